"""The slots of the draft worker."""

import numpy as np
import pytest
import torch

from specserve.drafting.workspace import DenseDists, SparseDists, Workspace
from specserve.errors import ProtocolError
from specserve.sampling import wire

CPU = torch.device("cpu")


def workspace(form: str, slots: int = 8, vocab: int = 20, hidden: int = 0) -> Workspace:
    store = SparseDists(slots, 16, CPU) if form == "sparse" else DenseDists(slots, vocab, CPU)
    return Workspace(slots, store, CPU, hidden)


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_what_is_kept_is_drawn_from_and_shipped(form: str) -> None:
    """Slots in any order give back their own dists; tokens drawn are those of the shipped dist."""
    space = workspace(form)
    dist = torch.softmax(torch.randn(3, 20, generator=torch.Generator().manual_seed(0)) * 3, -1)
    space.put(np.array([6, 0, 3]), dist)
    order = np.array([0, 3, 6])
    shipped = wire.decode(space.ship(order), 20, CPU).dense(20)
    assert torch.allclose(shipped, dist[[1, 2, 0]], atol=0.01)
    noise = (torch.arange(4000).double() + 0.5) / 4000
    drawn = torch.bincount(space.draw(np.full(4000, 3), noise), minlength=20) / 4000
    assert torch.allclose(drawn, shipped[1], atol=6e-4)


def test_the_truncation_is_to_the_likeliest() -> None:
    """A sparse store of width 16 ships the 16 likeliest ids, renormalised."""
    space = workspace("sparse")
    dist = torch.arange(1, 21).float()[None] / 210
    space.put(np.array([1]), dist)
    shipped = wire.decode(space.ship(np.array([1])), 20, CPU).dense(20)[0]
    assert (shipped > 0).tolist() == [False] * 4 + [True] * 16
    assert shipped.sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("slots", [[8], [-1], [0, 99]])
def test_a_slot_that_there_is_not_is_refused(slots: list[int]) -> None:
    """Writing, drawing and shipping outside the workspace are protocol errors and change nothing."""
    space = workspace("sparse", hidden=2)
    bad = np.array(slots)
    before = space.ship(np.arange(8)).rows.copy()
    calls = (
        lambda: space.put(bad, torch.ones(len(slots), 20) / 20),
        lambda: space.draw(bad, torch.zeros(len(slots)).double()),
        lambda: space.ship(bad),
        lambda: space.put_hidden(bad, torch.ones(len(slots), 2)),
        lambda: space.hidden(bad),
    )
    for call in calls:
        with pytest.raises(ProtocolError):
            call()
    assert (space.ship(np.arange(8)).rows == before).all()


def test_hidden_states_are_scattered_and_gathered_by_slot() -> None:
    """Row i of what is put belongs to slots[i]; nothing is kept where no hidden size was asked for."""
    space = workspace("sparse", hidden=3)
    space.put_hidden(np.array([5, 2]), torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    assert space.hidden(np.array([2, 5, 0])).tolist() == [[4, 5, 6], [1, 2, 3], [0, 0, 0]]
    assert workspace("sparse").hidden(np.array([0])).shape == (1, 0)
