"""The counter-based generator."""

import numpy as np
import pytest
import torch

from specserve.sampling.noise import Purpose, philox, uniform


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    """Philox4x32-10 agrees with the known-answer vectors published with it."""
    assert (philox(words(counter), words(key)) == words(expected)).all()


def test_a_draw_depends_on_seed_purpose_and_position_only() -> None:
    """A batch gives what single calls give, in any order, for negative seeds and large positions too."""
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    positions = torch.tensor([0, 5, 2**31, 2**32 - 1, 7])
    batch = uniform(seeds, Purpose.ACCEPT, positions)
    for i in (4, 0, 3, 1, 2):
        assert uniform(seeds[i : i + 1], Purpose.ACCEPT, positions[i : i + 1]).item() == batch[i].item()
    assert len(set(batch.tolist())) == 5


def test_uniforms_are_in_the_unit_interval_and_even() -> None:
    """Many draws over positions lie in [0, 1) with the mean, variance and tails of a uniform."""
    draws = uniform(torch.tensor([42]), Purpose.CHOOSE, torch.arange(300_000))
    assert draws.dtype == torch.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean().item() - 0.5) < 2e-3
    assert abs(draws.var().item() - 1 / 12) < 1e-3
    assert abs((draws < 1e-3).double().mean().item() - 1e-3) < 2e-4


def test_purposes_seeds_and_positions_are_independent() -> None:
    """Streams that differ in one part of their key do not correlate."""
    positions = torch.arange(100_000)
    base = uniform(torch.tensor([3]), Purpose.PROPOSE, positions)
    others = [
        uniform(torch.tensor([3]), Purpose.ACCEPT, positions),
        uniform(torch.tensor([3]), Purpose.CHOOSE, positions),
        uniform(torch.tensor([4]), Purpose.PROPOSE, positions),
        uniform(torch.tensor([3]), Purpose.PROPOSE, positions + 1),
        uniform(torch.tensor([3]), Purpose.PROPOSE, positions, 1),
        uniform(torch.tensor([3]), Purpose.PROPOSE, positions, 0, 1),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1].item()) < 0.015


def test_seeds_and_positions_broadcast() -> None:
    """[n, 1] seeds and [n, m] positions give [n, m] draws."""
    positions = torch.arange(6).view(2, 3)
    draws = uniform(torch.tensor([[1], [2]]), Purpose.ACCEPT, positions)
    assert draws.shape == (2, 3)
    assert draws[1, 2] == uniform(torch.tensor([2]), Purpose.ACCEPT, torch.tensor([5]))[0]
