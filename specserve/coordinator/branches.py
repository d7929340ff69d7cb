"""One plan for drafting ahead, and what it has brought: arrays over branches and steps, not an object per node.

The slots and blocks of all branches are leased in one go and come back in one go, but for those of the branches that
came true, which their requests take over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.coordinator.batches import flat, ints, joined
from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.chain import Chain
from specserve.coordinator.requests import RequestState
from specserve.coordinator.slots import SlotPool
from specserve.errors import ProtocolError
from specserve.transport.messages import Array, Dists, PlanAhead, PushAhead

_NONE = -1


@dataclass(slots=True)
class Trunk:
    """One request's share of a plan: committed tokens and checked chain, fed from `start` on.

    base counts the committed tokens that take part. due: the feed reaches the end of the chain, so that branches may
    leave it. text_start is where the worker's knowledge of the text ends.
    """

    state: RequestState
    epoch: int
    base: int
    start: int
    feed: int
    chain: Chain
    due: bool
    text_start: int = 0
    gone: bool = False

    def tokens(self) -> list[int]:
        """The text that is sent, chain included."""
        return self.state.tokens[self.text_start : self.base] + self.chain.tokens


@dataclass(frozen=True, slots=True)
class Branches:
    """All branches of a plan in columns, int64 [B], trunk by trunk and for each trunk the likeliest first.

    trunks index the plan's trunks; kept and ranks are the outcome; firsts the step in which its guess is fed; depths
    the tokens to draft behind it; own the blocks that follow the trunk's full blocks.
    """

    trunks: Array
    kept: Array
    ranks: Array
    firsts: Array
    depths: Array
    own: Array

    def __len__(self) -> int:
        return len(self.trunks)


@dataclass(frozen=True, slots=True)
class Found:
    """The branch, by number, of each outcome asked for (−1: none foresaw it), and what became of the guesses there.

    A guess was made where the outcome has its next token: ranks int64 [n], whether it was right, and whether that was
    behind the whole chain, both bool [n].
    """

    branches: list[int]
    ranks: Array
    right: Array
    whole: Array


class AheadPlan:
    """Trunks, their branches, and the tokens that have come for them; it leases all that the branches need."""

    def __init__(
        self,
        number: int,
        trunks: Sequence[Trunk],
        branches: Branches,
        sent_s: float,
        slots: SlotPool,
        blocks: BlockPool,
    ) -> None:
        self.number = number
        self.trunks = trunks
        self.branches = branches
        self.sent_s = sent_s
        self.busy_s = 0.0
        self.over = False  # the worker writes nothing of it any more
        self.settled = False  # the round that it foresaw is over
        self._slots, self._blocks = slots, blocks
        self._by_row = {trunk.state.row: index for index, trunk in enumerate(trunks)}
        self._branch_counts: list[int] = np.bincount(branches.trunks, minlength=len(trunks)).tolist()
        self._seen: set[int] = set()
        self._slot_starts = np.cumsum(branches.depths) - branches.depths
        self._block_starts = np.cumsum(branches.own) - branches.own
        self._leased_slots = slots.lease(int(branches.depths.sum()))
        self._leased_blocks = blocks.lease(int(branches.own.sum()))
        self._slots_left = np.ones(len(self._leased_slots), dtype=np.bool_)  # not taken over by a request
        self._blocks_left = np.ones(len(self._leased_blocks), dtype=np.bool_)
        # Column 0 of these is a branch's guess, column 1 its first drafted token.
        shape = len(branches), 1 + int(branches.depths.max(initial=0))
        self._tokens = np.full(shape, _NONE, dtype=np.int32)
        self._dist_push = np.full(shape, _NONE, dtype=np.int32)
        self._dist_row = np.zeros(shape, dtype=np.int32)
        self._pushed: list[Dists] = []

    def message(self) -> PlanAhead:
        """The plan in columns, for trunks whose text_start was set."""
        trunks, branches = self.trunks, self.branches
        texts = [trunk.tokens() for trunk in trunks]
        tables = [trunk.state.draft_table for trunk in trunks]
        bases = ints([trunk.base for trunk in trunks])
        flat_tables, lengths = joined(tables), ints([len(table) for table in tables])
        return PlanAhead(
            plan=self.number,
            rows=np.array([trunk.state.row for trunk in trunks], dtype=np.int64),
            epochs=ints([trunk.epoch for trunk in trunks]),
            bases=bases,
            text_starts=ints([trunk.text_start for trunk in trunks]),
            text_lengths=ints([len(text) for text in texts]),
            texts=flat(texts),
            starts=ints([trunk.start for trunk in trunks]),
            chain_lengths=ints([len(trunk.chain.tokens) for trunk in trunks]),
            chain_slots=flat([trunk.chain.slots for trunk in trunks]),
            table_lengths=lengths,
            tables=flat_tables,
            branch_counts=ints(self._branch_counts),
            parents=branches.kept.astype(np.int32),
            ranks=branches.ranks.astype(np.int32),
            firsts=branches.firsts.astype(np.int32),
            depths=branches.depths.astype(np.int32),
            slots=self._leased_slots.astype(np.int32),
            own_lengths=branches.own.astype(np.int32),
            own_blocks=self._leased_blocks.astype(np.int32),
            copies=self._copies(bases, flat_tables, np.cumsum(lengths) - lengths),
        )

    def _copies(self, bases: Array, tables: Array, starts: Array) -> Array:
        """The trunk's block that is partly before each branch and partly beyond; −1 where they part at its end."""
        ends = bases[self.branches.trunks] + self.branches.kept
        block, within = np.divmod(ends, self._blocks.block_tokens)
        copies = np.full(len(ends), _NONE, dtype=np.int32)
        partly = within > 0
        copies[partly] = tables[(starts[self.branches.trunks] + block)[partly]]
        return copies

    # ---- what comes

    def rows(self, step: int) -> int:
        """Rows of the worker's forward in this step."""
        firsts = self.branches.firsts
        started = (firsts <= step) & (step < firsts + self.branches.depths)
        return int(np.count_nonzero(started)) + (len(self.trunks) if step == 0 else 0)

    def take(self, push: PushAhead, vocab_size: int) -> bool:
        """Keep what was pushed; false when this push was seen before. Raises ProtocolError for impossible ones."""
        self._check(push, vocab_size)
        if push.step in self._seen:
            return False
        self._seen.add(push.step)
        self.busy_s += push.busy_s
        columns = push.places + 1
        self._tokens[push.branches, columns] = push.tokens
        if len(push.dists.rows):
            drawn = push.places >= 0
            at = push.branches[drawn], columns[drawn]
            self._dist_push[at] = len(self._pushed)
            self._dist_row[at] = np.arange(len(push.dists.rows))
            self._pushed.append(push.dists)
        return True

    def _check(self, push: PushAhead, vocab_size: int) -> None:
        count = len(push.tokens)
        if push.branches.shape != (count,) or push.places.shape != (count,) or push.step < 0:
            raise ProtocolError(f"push {push.step} of plan {push.plan} has columns of unequal length")
        if not count:
            return
        if push.branches.min() < 0 or push.branches.max() >= len(self.branches):
            raise ProtocolError(f"push {push.step} of plan {push.plan} names branches that were not planned")
        if push.places.min() < _NONE or (push.places >= self.branches.depths[push.branches]).any():
            raise ProtocolError(f"push {push.step} of plan {push.plan} has chains longer than their leases")
        if push.tokens.min() < 0 or push.tokens.max() >= vocab_size:
            raise ProtocolError(f"push {push.step} of plan {push.plan} has tokens outside the vocabulary")
        drawn = np.count_nonzero(push.places >= 0)
        if len(push.dists.rows) not in (0, drawn):
            raise ProtocolError(f"push {push.step} of plan {push.plan} has {len(push.dists.rows)} dists for {drawn}")

    # ---- what comes true

    def trunk_of(self, state: RequestState, base: int) -> int | None:
        """The request's trunk behind so many committed tokens, by number; None if it has no branches, or left."""
        index = self._by_row.get(state.row)
        if index is None:
            return None
        trunk = self.trunks[index]
        current = trunk.base == base and trunk.epoch == state.epoch and not trunk.gone
        return index if current and self._branch_counts[index] else None

    def find(self, trunks: Sequence[int], kept: Sequence[int], tokens: Sequence[int]) -> Found:
        """The branches of these outcomes of these trunks."""
        wanted_kept = np.full(len(self.trunks), _NONE - 1)
        wanted_tokens = np.zeros(len(self.trunks), dtype=np.int64)
        wanted_kept[list(trunks)], wanted_tokens[list(trunks)] = kept, tokens
        owners = self.branches.trunks
        tried = np.flatnonzero(self.branches.kept == wanted_kept[owners])
        right = self._tokens[tried, 0] == wanted_tokens[owners[tried]]
        true = tried[right]
        numbers = np.full(len(self.trunks), _NONE)
        numbers[owners[true]] = true
        lengths = np.array([len(trunk.chain.tokens) for trunk in self.trunks])
        whole = self.branches.kept[tried] == lengths[owners[tried]]
        return Found(numbers[list(trunks)].tolist(), self.branches.ranks[tried], right, whole)

    def adopt(self, trunks: Sequence[int], branches: Sequence[int]) -> None:
        """Hand each branch over to its trunk's request: the chain beyond its guess, its table, and what is cached.

        A branch for which nothing came yet is not handed over.
        """
        tokens = self._tokens[list(branches)]
        lengths = np.cumprod(tokens[:, 1:] != _NONE, axis=1).sum(axis=1).tolist()
        rows = zip(trunks, branches, tokens.tolist(), lengths, self._dists_of(branches), strict=True)
        tails: list[int] = []
        for trunk, branch, row, length, (sources, places) in rows:
            if length == 0:
                continue
            at = int(self._slot_starts[branch])
            self._slots_left[at : at + length] = False
            slots = self._leased_slots[at : at + length].tolist()
            state = self.trunks[trunk].state
            state.chain = Chain(row[1 : length + 1], slots, length - 1, sources[:length], places[:length])
            end = self.trunks[trunk].base + int(self.branches.kept[branch])
            state.draft_cached = end + length  # with the guess, and without the last drafted token
            tails += self._adopt_table(self.trunks[trunk], branch)
        self._blocks.free(tails)

    def _dists_of(self, branches: Sequence[int]) -> list[tuple[Sequence[Dists | None], Sequence[int]]]:
        """Sources and rows of each branch's dists, from its first drafted token on; none where nothing was drawn."""
        if not self._pushed:
            return [((), ())] * len(branches)
        by_number = {number: dists for number, dists in enumerate(self._pushed)}
        sources = [[by_number.get(push) for push in row] for row in self._dist_push[list(branches), 1:].tolist()]
        return list(zip(sources, self._dist_row[list(branches), 1:].tolist(), strict=True))

    def _adopt_table(self, trunk: Trunk, branch: int) -> list[int]:
        """Put the branch's own blocks behind the full ones that it shares with the trunk; returns those it replaces.

        These may go at once, although the worker may still write to them: it does what it is told in order, so
        whoever is given them next writes later.
        """
        table = trunk.state.draft_table
        shared = (trunk.base + int(self.branches.kept[branch])) // self._blocks.block_tokens
        begin = int(self._block_starts[branch])
        end = begin + int(self.branches.own[branch])
        tail = self._blocks.trim(table, shared * self._blocks.block_tokens)
        table.extend(self._leased_blocks[begin:end].tolist())
        self._blocks_left[begin:end] = False
        return tail

    def leave(self, state: RequestState) -> None:
        """The request ended, or lost its place."""
        index = self._by_row.get(state.row)
        if index is not None:
            self.trunks[index].gone = True

    def release(self) -> None:
        """Give back all that no request took over."""
        self._slots.free(self._leased_slots[self._slots_left])
        self._blocks.free(self._leased_blocks[self._blocks_left])
