"""The way between host and device: what is sent is not waited for, and what is read is read at once.

Each time the host looks at a value it waits until the device has computed it, and the device then waits for what the
host says next. So a worker looks once in a step, at all that it has to know.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


def send(values: torch.Tensor | Array, device: torch.device) -> torch.Tensor:
    """Values of the host on the device, behind what it was told to do before; on a CPU these very values."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # without, a transfer may wait for all that is under way
    return tensor.to(device, non_blocking=True)


def read(*tensors: torch.Tensor) -> tuple[Array, ...]:
    """What these tensors of one device hold, in one transfer; on a CPU their own memory."""
    if all(tensor.is_cpu for tensor in tensors):
        return tuple(tensor.numpy() for tensor in tensors)
    flat = [tensor.contiguous().view(-1) for tensor in tensors]
    found = torch.cat([each.view(torch.uint8) for each in flat]).cpu().numpy().tobytes()
    arrays, begin = [], 0
    for tensor, each in zip(tensors, flat, strict=True):
        end = begin + each.numel() * each.element_size()
        # Its own bytes, since what begins in the middle of others need not be aligned; and writable ones.
        arrays.append(np.frombuffer(bytearray(found[begin:end]), _NUMPY[tensor.dtype]).reshape(tuple(tensor.shape)))
        begin = end
    return tuple(arrays)


_NUMPY: dict[torch.dtype, Any] = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
