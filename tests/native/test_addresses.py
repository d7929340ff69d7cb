"""What C is handed is what it takes it for, or is refused before it is followed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specserve.native import addresses
from specserve.sampling import _kernels as draws
from specserve.verification import _kernels as rules


def test_what_is_as_c_takes_it_has_an_address():
    """Of as many numbers as are said, whatever their shape."""
    tensor, array = torch.zeros(2, 3), np.zeros((2, 3), np.int64)
    assert addresses.of_tensor("x", tensor, torch.float32, 6) == tensor.data_ptr()
    assert addresses.of_array("x", array, np.int64, 6) == array.ctypes.data


@pytest.mark.parametrize(
    ("tensor", "error", "said"),
    [
        (
            torch.zeros(6, dtype=torch.float64),
            TypeError,
            "x must be torch.float32 without gaps on a CPU, found torch.float64",
        ),
        (torch.zeros(6, device="meta"), TypeError, "on meta"),
        (torch.zeros(6, 2)[:, 0], TypeError, "with gaps"),
        (torch.zeros(5), IndexError, r"x must be 6 numbers, found \[5\]"),
    ],
)
def test_another_tensor_is_refused(tensor, error, said):
    """By type, device, gaps and number."""
    with pytest.raises(error, match=said):
        addresses.of_tensor("x", tensor, torch.float32, 6)


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.zeros(6, np.int32), TypeError),
        (np.zeros((6, 2), np.int64)[:, 0], TypeError),
        (np.zeros(5, np.int64), IndexError),
    ],
)
def test_another_array_is_refused(array, error):
    """As tensors are."""
    with pytest.raises(error, match="x must be"):
        addresses.of_array("x", array, np.int64, 6)


DIST = torch.full((2, 8), 0.125)
KEYS = torch.zeros(2, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    "run",
    [
        lambda: draws.draw(DIST, torch.zeros(1)),
        lambda: draws.race(DIST, KEYS[:1]),
        lambda: draws.race_scores(torch.zeros(2, 7), DIST, KEYS),
        lambda: draws.race_scores(torch.zeros(2, 8), DIST, KEYS[:1]),
        lambda: draws.softmax(DIST, np.ones(1, np.float32), 8),
        lambda: draws.softmax(DIST, np.ones(2), 8),
        lambda: draws.philox(np.zeros((5, 2), np.uint64)),
        lambda: rules.judge_exact(DIST[None], torch.zeros(1, 1), torch.zeros(1), torch.zeros(1, 1)),
        lambda: rules.judge_exact(DIST[None], torch.zeros(1, 0), torch.zeros(1), torch.zeros(1, 2)),
        lambda: rules.judge_coupled(DIST[None], torch.zeros(1, 1), torch.zeros(1), KEYS[:1]),
    ],
)
def test_kernels_refuse_too_little_noise(run):
    """Of draws and rules alike: each would read on behind what it was given."""
    with pytest.raises((TypeError, IndexError), match="must be"):
        run()
