"""Which layer stands for a linear one whose weights are rounded: the one place that knows what a device can multiply.

Of each quantization there is a layer with the rounded weights written out in the dtype, which works everywhere, and one
that keeps their bytes, for devices and sizes that it names itself (`serves`, `fits`). On a CPU written-out int8 layers
of float32 become bytes once more in `_linear`, where our own kernels are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import _joint, _linear
from specserve.models._float8 import Float8Product, Float8Rows
from specserve.models._int8 import Int8Linear
from specserve.models._int8_digits import Int8Digits

Quantization = Literal["int8", "fp8"]


@dataclass(frozen=True, slots=True)
class Kinds:
    """The layers of one quantization."""

    kept: type[Int8Digits] | type[Float8Product]
    written_out: type[Int8Linear] | type[Float8Rows]

    def keeps(self, dtype: torch.dtype, device: torch.device, inputs: int, outputs: int) -> bool:
        """Whether a layer of these sizes keeps its weights as bytes there."""
        return self.kept.serves(dtype, device) and self.kept.fits(inputs, outputs)


KINDS: dict[str, Kinds] = {"int8": Kinds(Int8Digits, Int8Linear), "fp8": Kinds(Float8Product, Float8Rows)}
"""By quantization."""

_DEVICES = ("cpu", "cuda")


def round_weights(model: Any, quantization: Quantization, device: torch.device) -> None:
    """Replace all linear layers of a model in place, by what serves on the device that it is going to be on.

    Raises ConfigError where matrices are left that stay unrounded.
    """
    kinds = KINDS[quantization]
    for parent in list(model.modules()):
        plain = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        kept = {
            name: child
            for name, child in plain.items()
            if kinds.keeps(child.weight.dtype, device, child.in_features, child.out_features)
        }
        _joint.replace(parent, kept, kinds.kept)
        for name in plain.keys() - kept.keys():
            setattr(parent, name, kinds.written_out(plain[name]))
    rounded = {id(part) for each in model.modules() if isinstance(each, kinds.written_out) for part in each.modules()}
    for path, module in model.named_modules():
        if id(module) in rounded or isinstance(module, nn.Embedding):
            continue
        left = next((name for name, weight in module.named_parameters(recurse=False) if weight.ndim > 1), None)
        if left is not None:
            raise ConfigError(
                f"quantization {quantization} rounds linear layers only, and {path}.{left} of {type(model).__name__} "
                f"is a matrix of a {type(module).__name__}; set quantization to none"
            )


def reads_bytes(config: ModelConfig, device: torch.device) -> bool:
    """Whether the weights of a rounded model stay bytes, where their sizes fit; else they are written out."""
    if config.quantization == "int8" and _linear.reads_int8(config.dtype, device):
        return True
    return KINDS[config.quantization].kept.serves(getattr(torch, config.dtype), device)


def held_bytes(shape: Sequence[int], config: ModelConfig, device: torch.device) -> int:
    """Bytes that a rounded matrix [outputs, inputs] takes there, with a float32 scale for each output of bytes."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    in_panels = config.quantization == "int8" and _linear.reads_int8(config.dtype, device)
    if in_panels or KINDS[config.quantization].keeps(dtype, device, prod(shape[1:]), shape[0]):
        return prod(shape) + torch.float32.itemsize * shape[0]
    return dtype.itemsize * prod(shape)


def refuse_unfit(config: ModelConfig, *, recurrent: bool, emulated: bool) -> None:
    """Raise ConfigError for a model that cannot have the quantization of its configuration."""
    if config.quantization not in KINDS:
        return
    if emulated:
        raise ConfigError(f"{config.source} models have no weights; set quantization {config.quantization} to none")
    if recurrent:
        raise ConfigError(
            f"quantization {config.quantization} is not there for models with recurrent layers, such as "
            f"{config.source}; set it to none"
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"quantization {config.quantization} is not there for models held by several processes; set "
            f"tensor_parallel {config.tensor_parallel} to 1, or quantization to none"
        )


def refuse_device(config: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError for a device that has no numbers of float8, which fp8 rounds rows to wherever it computes."""
    if config.quantization == "fp8" and device.type not in _DEVICES:
        raise ConfigError(
            f"quantization fp8 is there on {' and '.join(_DEVICES)} devices, and device is {str(device)!r}; use one of "
            f"those, or set quantization to int8 or none"
        )
