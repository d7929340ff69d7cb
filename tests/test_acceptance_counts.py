"""Acceptance counters: published examples of what a round of verdicts must add up to."""

from __future__ import annotations

import pytest

from specserve.coordinator.commits import Commit, Tally, alike, tallied

Verdicts = list[tuple[int, int]]
"""Drafted tokens offered and kept, row by row."""


def counted(verdicts: Verdicts) -> Tally:
    commits = [Commit(None, [7] * (kept + 1), offered, kept, kept, [], offered) for offered, kept in verdicts]
    return tallied(alike(commits))


@pytest.mark.parametrize(
    ("verdicts", "drafts", "offered", "kept", "per_position"),
    [
        ([(3, 3)], 1, 3, 3, [1, 1, 1]),
        ([(3, 1)], 1, 3, 1, [1, 0, 0]),
        ([(2, 2), (1, 1)], 2, 3, 3, [2, 1]),
        ([(0, 0)], 0, 0, 0, []),
        ([(3, 2), (3, 1)], 2, 6, 3, [2, 1, 0]),
    ],
)
def test_a_round_adds_up(
    verdicts: Verdicts, drafts: int, offered: int, kept: int, per_position: tuple[int, ...]
) -> None:
    """Drafts, offered and kept tokens, and kept tokens by chain position; a row without a draft adds nothing."""
    tally = counted(verdicts)
    assert (tally.drafted_at[0] if tally.drafted_at else 0) == drafts
    assert (sum(tally.drafted_at), sum(tally.kept_at), tally.kept_at) == (offered, kept, tuple(per_position))
    assert tally.bonus + tally.correction + tally.plain == len(verdicts)


def test_acceptance_by_position_and_mean_length() -> None:
    """Chains of 4, 4 and 2 with 2, 4 and 0 kept: 2/3, 2/3, 1/2, 1/2 by position, and 3 1/3 tokens for a chain of 4."""
    tally = counted([(4, 2), (4, 4), (2, 0)])
    assert (tally.drafted_at, tally.kept_at) == ((3, 3, 2, 2), (2, 2, 1, 1))
    share = [kept / drafted for kept, drafted in zip(tally.kept_at, tally.drafted_at, strict=True)]
    assert share == pytest.approx([2 / 3, 2 / 3, 1 / 2, 1 / 2])
    assert 1 + sum(share) == pytest.approx(10 / 3)
    assert (tally.bonus, tally.correction, tally.plain) == (1, 2, 0)
