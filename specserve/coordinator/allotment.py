"""Which outcomes of which requests get a branch, and how deep: columns over all candidates, not one by one.

Every request gets its likeliest outcome before any gets its second, as long as there is room; so where slots or blocks
run short, the least valuable outcomes go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.branches import Branches, Trunk
from specserve.coordinator.outcomes import OutcomeOdds
from specserve.coordinator.slots import SlotPool
from specserve.transport.messages import Array


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no branch may exceed: forwards of the worker, and positions of its context."""

    steps: int
    context: int


def allot(
    trunks: Sequence[Trunk],
    wanted: Sequence[int],
    odds: OutcomeOdds,
    count: int,
    bounds: Bounds,
    slots: SlotPool,
    blocks: BlockPool,
) -> Branches:
    """At most `count` branches for each due trunk, none deeper than its request's `wanted` depth."""
    due = np.flatnonzero([trunk.due for trunk in trunks])
    lengths, bases, starts, left = _columns([trunks[index] for index in due.tolist()])
    kept, ranks = _outcomes(odds, lengths, count)
    firsts = np.where((kept < lengths) & (starts >= bases + kept), 0, 1)
    ends = bases + kept
    depths = np.minimum(bounds.steps - firsts, np.minimum(left - kept - 2, bounds.context - ends - 2))
    depths = np.minimum(depths, np.array(wanted, dtype=np.int64)[due])
    possible = (kept >= 0) & (depths > 0)
    owners = np.broadcast_to(due, kept.shape)
    columns = [column[possible] for column in (owners, kept, ranks, firsts, depths, ends)]
    return _within(columns, slots.free_count, blocks)


def _columns(trunks: Sequence[Trunk]) -> tuple[Array, Array, Array, Array]:
    """Chain lengths, bases, starts, and tokens that max_tokens leaves."""
    rows = [(len(each.chain.tokens), each.base, each.start, each.state.tokens_left) for each in trunks]
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _outcomes(odds: OutcomeOdds, lengths: Array, count: int) -> tuple[Array, Array]:
    """Tokens kept, −1 for none left, and rank of the i-th likeliest outcome of each chain, int64 [count, chains]."""
    kept = np.full((count, len(lengths)), -1, dtype=np.int64)
    ranks = np.zeros_like(kept)
    for length in set(lengths.tolist()):
        likeliest = odds.likeliest(length)[:count]
        mine = lengths == length
        kept[: len(likeliest), mine] = np.array([outcome.kept for outcome in likeliest])[:, None]
        ranks[: len(likeliest), mine] = np.array([outcome.rank for outcome in likeliest])[:, None]
    return kept, ranks


def _within(columns: Sequence[Array], free_slots: int, blocks: BlockPool) -> Branches:
    """The first of these candidates that slots and blocks suffice for, the last one perhaps less deep."""
    owners, kept, ranks, firsts, depths, ends = columns
    depths = np.minimum(depths, free_slots - (np.cumsum(depths) - depths))
    own = -(-(ends + depths) // blocks.block_tokens) - ends // blocks.block_tokens
    fits = np.logical_and.accumulate((depths > 0) & (np.cumsum(own) <= blocks.free_count))
    order = np.argsort(owners[fits], kind="stable")
    return Branches(*(column[fits][order] for column in (owners, kept, ranks, firsts, depths, own)))
