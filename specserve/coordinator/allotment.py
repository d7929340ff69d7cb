"""Which outcomes of which requests get a branch, and how deep: columns over all candidates, unless these are few.

Every request gets its likeliest outcome before any gets its second, as long as there is room; so where slots or blocks
run short, the least valuable outcomes go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

import numpy as np

from specserve.coordinator.batches import columns
from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.branches import Branches, Trunk
from specserve.coordinator.outcomes import OutcomeOdds
from specserve.coordinator.slots import SlotPool
from specserve.transport.messages import Array

_FEW = 40
"""Candidates that are sooner looked at one by one than as columns."""


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
    """At most `count` branches for each due trunk, none deeper than `wanted` of its request."""
    if count * len(trunks) <= _FEW:
        return _one_by_one(trunks, wanted, odds, count, bounds, slots.free_count, blocks)
    numbers = [
        (index, len(each.chain.tokens), each.base, each.start, each.state.tokens_left, most, not each.known)
        for index, (each, most) in enumerate(zip(trunks, wanted, strict=True))
        if each.due
    ]
    owners, lengths, bases, starts, left, most, unknown = columns(numbers, 7)[..., None]
    table = np.empty((6, len(numbers), count), dtype=np.int64)  # the columns of `Branches`, the last one for ends
    table[0] = owners
    kept, ranks, firsts, depths, ends = table[1:]
    _fill_outcomes(kept, ranks, odds, lengths[:, 0])
    np.add(bases, kept, out=ends)
    firsts[:] = np.where(kept == lengths, unknown, starts < ends)
    depths[:] = np.minimum(np.minimum(bounds.steps - firsts, most), np.minimum(left - kept, bounds.context - ends) - 2)
    possible = (kept >= 0) & (depths > 0)
    found = table[:, possible]
    own = _own_blocks(found, blocks.block_tokens)
    if found[4].sum() <= slots.free_count and own.sum() <= blocks.free_count:
        found[5] = own
        return Branches.of(found)
    in_turns = np.argsort(possible.nonzero()[1], kind="stable")
    return _within(found[:, in_turns], slots.free_count, blocks)


def _one_by_one(
    trunks: Sequence[Trunk],
    wanted: Sequence[int],
    odds: OutcomeOdds,
    count: int,
    bounds: Bounds,
    free_slots: int,
    blocks: BlockPool,
) -> Branches:
    """What `allot` says, candidate by candidate."""
    found: list[tuple[int, int, int, int, int, int]] = []
    free_blocks = blocks.free_count
    due = [
        (index, each, most, odds.likeliest(len(each.chain.tokens)).in_turn)
        for index, (each, most) in enumerate(zip(trunks, wanted, strict=True))
        if each.due
    ]
    for place, (index, each, most, outcomes) in product(range(count), due):
        if place >= len(outcomes):
            continue
        kept, rank = outcomes[place]
        end = each.base + kept
        first = int(not each.known if kept == len(each.chain.tokens) else each.start < end)
        depth = min(bounds.steps - first, most, each.state.tokens_left - kept - 2, bounds.context - end - 2)
        if depth <= 0:
            continue
        depth = min(depth, free_slots)
        own = blocks.needed(end + depth) - end // blocks.block_tokens
        if depth <= 0 or own > free_blocks:
            break
        free_slots, free_blocks = free_slots - depth, free_blocks - own
        found.append((index, kept, rank, first, depth, own))
    found.sort(key=itemgetter(0))
    return Branches.of(np.array(found, dtype=np.int64).reshape(-1, 6).T)


def _fill_outcomes(kept: Array, ranks: Array, odds: OutcomeOdds, lengths: Array) -> None:
    """Write tokens kept, −1 for none left, and rank of the i-th likeliest outcome of each chain, [chains, count]."""
    kept.fill(-1)
    for length in set(lengths.tolist()):
        outcomes = odds.likeliest(length)
        mine, count = lengths == length, min(len(outcomes), kept.shape[1])
        kept[mine, :count] = outcomes.kept[:count]
        ranks[mine, :count] = outcomes.ranks[:count]


def _own_blocks(found: Array, block_tokens: int) -> Array:
    """Blocks that each branch has for itself: from the trunk's last partly filled one to its own end."""
    depths, ends = found[4:]
    own: Array = -(-(ends + depths) // block_tokens) - ends // block_tokens
    return own


def _within(found: Array, free_slots: int, blocks: BlockPool) -> Branches:
    """The first of these candidates that slots and blocks suffice for, the last one perhaps less deep."""
    owners, depths = found[0], found[4]
    np.minimum(depths, free_slots - (np.cumsum(depths) - depths), out=depths)
    own = _own_blocks(found, blocks.block_tokens)
    short = np.flatnonzero((depths <= 0) | (np.cumsum(own) > blocks.free_count))
    count = int(short[0]) if len(short) else len(owners)
    order = np.argsort(owners[:count], kind="stable")
    found[5] = own
    return Branches.of(found[:, order])
