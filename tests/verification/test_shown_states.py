"""Hidden states on their way out: those of the tokens that were asked for, in order, and never anything else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specserve.errors import ProtocolError
from specserve.transport.messages import Dists, Verify
from specserve.verification._rows import Row
from specserve.verification._shown import shown

NOTHING = np.empty(0, np.int32)


class Observed:
    """What a target kept of its last forward."""

    def __init__(self, states: torch.Tensor) -> None:
        self._states = states

    def observe(self, layers) -> None:
        """All there is was kept."""

    def observed(self) -> torch.Tensor:
        """See `ShowsHidden`."""
        return self._states


def row(index: int, feed: int, chain: int, of_feed: int) -> Row:
    """One that asks for so many of its feed's states."""
    tokens = np.zeros(feed, np.int32), np.zeros(chain, np.int32)
    return Row(index, index, None, 0, *tokens, np.zeros(chain, np.int32), NOTHING, True, shown=of_feed)


ROWS = [row(0, 4, 2, 3), row(1, 3, 1, 0), row(2, 2, 2, 2)]  # 6, 4 and 4 tokens
ASKED = np.array([3, 0, 2], np.int32)


def verify(asked: np.ndarray) -> Verify:
    """Nothing else of it is read here."""
    whole = Verify(1, *[NOTHING] * 9, Dists.none(), NOTHING, NOTHING)
    return replace(whole, shown=asked)


def places(states: torch.Tensor, last: list[int]) -> list[list[float]]:
    """The float32 states that came out."""
    hidden = shown(verify(ASKED), ROWS, np.array(last), Observed(states))
    return hidden.rows.view(np.float32).reshape(-1, states.shape[1]).tolist()


def test_states_of_the_newest_tokens_and_of_what_was_kept_come_in_order():
    """Of the first row three fed tokens and one drafted, of the second none, of the third all."""
    states = torch.arange(14.0)[:, None].repeat(1, 2)
    found = [first for first, _ in places(states, [0, 0, 1])]
    assert found == [1, 2, 3, 4, 10, 11, 12, 13]


@pytest.mark.parametrize("kept", [0, 5, 13])
def test_a_forward_in_parts_shows_zeros(kept):
    """Its last part alone is there, at other places, and perhaps with memory that nobody wrote."""
    assert places(torch.full((kept, 2), float("nan")), [0, 0, 1]) == [[0.0, 0.0]] * 8


def test_a_target_that_keeps_none_is_not_asked():
    """But for nothing."""
    with pytest.raises(ProtocolError, match="shows none"):
        shown(verify(ASKED), ROWS, np.array([0, 0, 1]), None)
    assert not len(shown(verify(np.zeros(3, np.int32)), ROWS, np.array([0, 0, 1]), None).rows)
