"""mamba_state_selective_copy by the original's own test, and which moments of a request's state are kept."""

from __future__ import annotations

import pytest
import torch

from specserve.errors import ProtocolError
from specserve.models._recurrent_state import RecurrentStates, StateKind, mamba_state_selective_copy
from specserve.models._stretches import Stretch, ragged

LAYERS, SLOTS, DEPTH = 3, 6, 2


def states(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """An intermediate whose every number is another one, and a current of −1."""
    size = (LAYERS, SLOTS, DEPTH + 1, *shape)
    intermediate = torch.arange(torch.Size(size).numel(), dtype=torch.float32).view(size)
    return intermediate, torch.full((LAYERS, SLOTS, *shape), -1.0)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5)], ids=["convolution", "state space"])
def test_each_decode_row_gets_the_state_after_its_last_accepted_token(shape):
    """Slots [1, 4, 0], accepted [2, 0, 1]: in all layers, and in no other slot."""
    intermediate, current = states(shape)
    mamba_state_selective_copy(
        intermediate, current, torch.tensor([1, 4, 0]), torch.tensor([2, 0, 1]), torch.zeros(3, dtype=torch.bool)
    )
    for slot, accepted in ((1, 2), (4, 0), (0, 1)):
        assert torch.equal(current[:, slot], intermediate[:, slot, accepted])
    assert (current[:, [2, 3, 5]] == -1).all()


def test_prefill_rows_copy_nothing():
    """With prefill [0, 1, 0, 1] rows 1 and 3 keep the state that they have."""
    intermediate, current = states((2,))
    prefill = torch.tensor([False, True, False, True])
    mamba_state_selective_copy(intermediate, current, torch.tensor([1, 4, 0, 2]), torch.tensor([2, 0, 1, 1]), prefill)
    assert torch.equal(current[:, [1, 0]], torch.stack([intermediate[:, 1, 2], intermediate[:, 0, 1]], 1))
    assert (current[:, [2, 3, 4, 5]] == -1).all()


def test_no_rows_change_nothing():
    """N = 0."""
    intermediate, current = states((2,))
    nothing = torch.empty(0, dtype=torch.int64)
    mamba_state_selective_copy(intermediate, current, nothing, nothing, nothing.bool())
    assert (current == -1).all()


def pool(rows: int = 2) -> RecurrentStates:
    """States of one number each in one layer."""
    found = RecurrentStates([StateKind("recurrent_states", ((0, 0),), (1,), torch.float32)], torch.device("cpu"))
    found.reserve(rows)
    return found


def read(states: RecurrentStates, owner: int, start: int, tokens: list[int]) -> list[Stretch]:
    """A stretch of a "model" whose state is the sum of the tokens read, replay included."""
    stretch = Stretch(start, tokens, torch.zeros(1, dtype=torch.int32).numpy(), 0, owner)
    again = states.resume(ragged([stretch]))
    for part in again:
        states.advanced([part], summed(states, part))
    states.read([stretch], summed(states, stretch))
    return again


def summed(states: RecurrentStates, stretch: Stretch) -> list[torch.Tensor]:
    return [before[:, states.slots([stretch])] + sum(stretch.tokens) for before in states.before]


def at_end(states: RecurrentStates, owner: int) -> float:
    return float(states.after[0][0, states.slots([Stretch(0, [0], None, 0, owner)]), 0])


def test_a_start_inside_the_last_stretch_goes_on_from_there():
    """All kept: a copy. Some kept: these are read again from the stretch's start. None beyond the base: the same."""
    states = pool()
    read(states, 7, 0, [1, 2, 3])
    assert read(states, 7, 3, [10, 20, 30]) == []
    assert at_end(states, 7) == 66
    assert [(part.start, part.tokens.tolist()) for part in read(states, 7, 5, [100])] == [(3, [10, 20])]
    assert at_end(states, 7) == 136
    assert read(states, 7, 5, [1000]) == []
    assert at_end(states, 7) == 1036


def test_covered_tells_where_a_row_may_start():
    """0 always; inside the last stretch and at its ends; before it nothing is left; past it only what was certain."""
    states = pool()
    read(states, 7, 0, [1, 2, 3])
    read(states, 7, 3, [10, 20, 30])
    assert [states.covered(7, start) for start in range(8)] == [0, 0, 0, 3, 4, 5, 6, 3]
    assert [states.covered(8, start) for start in (0, 1, 9)] == [0, 0, 0]
    with pytest.raises(ProtocolError, match="cannot start at 2"):
        read(states, 7, 2, [1])
    states.forget(7)
    states.forget(7)
    assert states.covered(7, 3) == 0


def test_a_forward_that_failed_can_be_sent_again():
    """States whose stretch was resumed and never read stay at their start: adopting is not done twice."""
    states = pool()
    read(states, 7, 0, [1, 2])
    stretch = Stretch(2, [5, 6], torch.zeros(1, dtype=torch.int32).numpy(), 0, 7)
    for _ in range(3):
        assert states.resume(ragged([stretch])) == []
    states.read([stretch], summed(states, stretch))
    assert at_end(states, 7) == 14


def test_places_are_bounded_and_the_longest_unused_goes_first():
    """A third request takes the place of the one that was not used for longest, never one of its own batch."""
    states = pool(2)
    read(states, 1, 0, [1])
    read(states, 2, 0, [2])
    read(states, 1, 1, [3])
    read(states, 3, 0, [4])
    assert [states.covered(owner, 1) for owner in (1, 2, 3)] == [1, 0, 1]
    read(states, 1, 0, [9])
    assert (states.covered(3, 1), at_end(states, 1)) == (1, 9)
