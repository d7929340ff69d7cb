"""Between host and device: one transfer brings what was there, and the pretended device notices mistakes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pretend_device import ELSEWHERE, Elsewhere, PretendDevice, there

from specserve.sampling import host

VALUES = (
    torch.tensor([[1, -2], [3, 2**40]]),
    torch.tensor([0.5, float("inf"), -0.0]),
    torch.tensor([True, False, True]),
    torch.tensor([[7]], dtype=torch.int32),
    torch.tensor([1.5, 2.0], dtype=torch.float16),
    torch.tensor([3.25], dtype=torch.float64),
    torch.empty(0, 4),
)


def test_what_is_read_is_what_is_there() -> None:
    """Every dtype and shape, in one look, from behind odd numbers of bytes; nothing of one into another."""
    here = host.read(*VALUES)
    with PretendDevice() as device:
        found = host.read(*[there(value) for value in VALUES])
    assert dict(device.looks) == {"cpu": 1}
    for mine, theirs, value in zip(found, here, VALUES, strict=True):
        assert mine.shape == theirs.shape == tuple(value.shape)
        assert mine.dtype == theirs.dtype == value.numpy().dtype
        assert np.array_equal(mine, value.numpy())
        assert mine.flags.aligned
        assert mine.flags.writeable


def test_on_a_cpu_nothing_is_copied() -> None:
    """Neither on the way there nor back."""
    value = torch.arange(3)
    assert host.send(value, torch.device("cpu")) is value
    (found,) = host.read(value)
    found[0] = 7
    assert value[0] == 7


def test_what_is_sent_is_not_waited_for() -> None:
    """Arrays and tensors, with their values."""
    with PretendDevice() as device:
        sent = [host.send(value, ELSEWHERE) for value in (np.arange(3), torch.arange(3))]
        assert all(isinstance(each, Elsewhere) for each in sent)
    assert device.sent == 2
    assert not device.waits
    assert not device.looks
    assert all(
        np.array_equal(array, np.arange(3)) for array in host.read(*[each.as_subclass(torch.Tensor) for each in sent])
    )


def test_the_pretended_device_notices_what_a_gpu_would() -> None:
    """Looks of every kind, transfers that wait, and tensors of two devices in one operator."""
    here, rows = torch.arange(4), there(torch.arange(4))
    looks = [
        rows.tolist,
        lambda: rows.sum().item(),
        lambda: bool((rows > 3).any()),
        lambda: rows[rows > 1],
        rows.nonzero,
        rows.cpu,
        lambda: rows.to("cpu"),
        lambda: rows.numpy(force=True),
        lambda: int(rows[0]),
    ]
    for look in looks:
        with PretendDevice() as device:
            look()
        assert sum(device.looks.values()) == 1, look
    with PretendDevice() as device:
        torch.tensor([1, 2], device=ELSEWHERE)
        here.to(ELSEWHERE)
        rows[here]
        torch.arange(4, device=ELSEWHERE)
        assert rows.device == ELSEWHERE
        assert rows + 1 is not None
        assert isinstance(torch.where(rows > 1, rows, 0), Elsewhere)
    assert sum(device.waits.values()) == 3
    assert not device.looks
    with PretendDevice(), pytest.raises(AssertionError, match="two devices"):
        rows + here
    with PretendDevice(), pytest.raises(TypeError, match="numpy"):
        rows.numpy()
