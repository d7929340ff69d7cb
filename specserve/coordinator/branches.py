"""One plan for drafting ahead, and what it has brought: arrays over branches and steps, not an object per node.

The slots and blocks of all branches are leased in one go and come back in one go, but for those of the branches that
came true, which their requests take over.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from specserve.coordinator.batches import INT32, columns, flat, ints, joined
from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.chain import Chain
from specserve.coordinator.outcomes import Guess, guess
from specserve.coordinator.requests import RequestState
from specserve.coordinator.slots import SlotPool
from specserve.errors import ProtocolError
from specserve.transport.messages import Array, Dists, PlanAhead, PushAhead

_NONE = -1

_FEW = 48
"""Pushed nodes that are sooner looked at one by one than as arrays."""

_MOSTLY = 3
"""Where so many times as many dists came as are wanted, or fewer, all of them are joined, and these picked at once."""

_SMALL = 64 * 1024
"""Bytes of dists that are joined in any case: to copy them takes no longer than to look for those that are wanted."""

_UNPLANNED = "names branches that were not planned"
_TOO_LONG = "has chains longer than their leases"
_UNKNOWN = "has tokens outside the vocabulary"


@dataclass(slots=True)
class Trunk:
    """One request's share of a plan: committed tokens and checked chain, fed from `start` on.

    base counts the committed tokens that take part. due: the feed reaches the end of the chain, so that branches may
    leave it, to offer `depth` tokens each. text_start is where the worker's knowledge of the text ends. next_slot is
    the chain's, where it tells what is likely behind all of it, so that nothing needs to be fed first, unless the
    worker did not get there.
    """

    state: RequestState
    epoch: int
    base: int
    start: int
    feed: int
    chain: Chain
    due: bool
    depth: int = 0
    next_slot: int | None = None
    text_start: int = 0
    gone: bool = False

    @property
    def known(self) -> bool:
        """What is likely behind the whole chain is known before anything is fed."""
        return self.next_slot is not None

    def tokens(self) -> list[int]:
        """The text that is sent, chain included."""
        return self.state.tokens[self.text_start : self.base] + self.chain.tokens


@dataclass(slots=True)
class Branches:
    """All branches of a plan in columns, int64 [B], trunk by trunk and for each trunk the likeliest first.

    table int64 [6, B] holds all of them, in this order. trunks index the plan's trunks; kept and ranks are the outcome;
    firsts the step in which its guess is fed; depths the tokens to draft behind it; own the blocks that follow the
    trunk's full blocks.
    """

    table: Array
    trunks: Array
    kept: Array
    ranks: Array
    firsts: Array
    depths: Array
    own: Array

    @staticmethod
    def of(table: Array) -> Branches:
        """The columns of this table."""
        return Branches(table, *table)

    def __len__(self) -> int:
        return len(self.trunks)


@dataclass(slots=True)
class _Lookup:
    """A plan's branches as what comes is looked up in them. Made when something does: plans are in a hurry to leave.

    rows are those of the worker's forwards, by step; the others are by branch.
    """

    rows: list[int]
    kept: list[int]
    ranks: list[int]
    depths: list[int]
    longest: Array
    slot_starts: Array
    block_starts: Array
    block_ends: Array

    @staticmethod
    def of(branches: Branches, trunks: int) -> _Lookup:
        """Of the branches of so many trunks."""
        block_ends = branches.own.cumsum()
        return _Lookup(
            _rows_by_step(branches, trunks),
            branches.kept.tolist(),
            branches.ranks.tolist(),
            branches.depths.tolist(),
            branches.depths.astype(np.uint64),
            branches.depths.cumsum() - branches.depths,
            block_ends - branches.own,
            block_ends,
        )


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
        self._branch_counts = np.bincount(branches.trunks, minlength=len(trunks))
        self._first_branches: list[int] = [0, *accumulate(self.branch_counts)]
        self._seen: set[int] = set()
        depths: list[int] = branches.depths.tolist()
        self._leased_slots = slots.lease(sum(depths))
        self._leased_blocks = blocks.lease(sum(branches.own.tolist()))
        self._slots_left = bytearray(b"\1") * len(self._leased_slots)  # 0 for those that a request took over
        self._blocks_left = bytearray(b"\1") * len(self._leased_blocks)
        # Column 0 of these is a branch's guess, column 1 its first drafted token. The last one stays empty.
        width = 2 + max(depths, default=0)
        self._numbers = array("i", [_NONE]) * (2 * len(depths) * width)  # both, which see this memory
        self._tokens, self._dist_rows = np.frombuffer(self._numbers, dtype=INT32).reshape(2, len(depths), width)
        self._pushed: list[Dists] = []
        self._dist_count = 0  # rows of all of them, which `_dist_rows` names
        self._drawn: bool | None = None  # drafted tokens come with their dists; None before the first ones

    @cached_property
    def _lookup(self) -> _Lookup:
        return _Lookup.of(self.branches, len(self.trunks))

    @property
    def branch_counts(self) -> list[int]:
        """Branches of each trunk."""
        counts: list[int] = self._branch_counts.tolist()
        return counts

    def message(self) -> PlanAhead:
        """The plan in columns, for trunks whose text_start was set."""
        trunks = self.trunks
        _, parents, ranks, firsts, depths, own_lengths = np.ascontiguousarray(self.branches.table, dtype=INT32)
        texts = [trunk.tokens() for trunk in trunks]
        tables = joined([trunk.state.draft_table for trunk in trunks])
        numbers = [
            (
                trunk.state.row,
                trunk.chain.plan,
                trunk.epoch,
                trunk.base,
                trunk.text_start,
                trunk.start,
                len(trunk.chain.tokens),
                _NONE if trunk.next_slot is None else trunk.next_slot,
                len(trunk.state.draft_table),
            )
            for trunk in trunks
        ]
        long = columns(numbers, 9)
        epochs, bases, text_starts, starts, chain_lengths, next_slots, table_lengths = long[2:].astype(INT32)
        return PlanAhead(
            plan=self.number,
            rows=long[0],
            epochs=epochs,
            bases=bases,
            text_starts=text_starts,
            text_lengths=ints([len(text) for text in texts]),
            texts=flat(texts),
            starts=starts,
            chain_lengths=chain_lengths,
            chain_slots=flat([trunk.chain.slots for trunk in trunks]),
            next_slots=next_slots,
            next_plans=long[1],
            table_lengths=table_lengths,
            tables=tables,
            branch_counts=self._branch_counts.astype(INT32),
            parents=parents,
            ranks=ranks,
            firsts=firsts,
            depths=depths,
            slots=self._leased_slots.astype(INT32),
            own_lengths=own_lengths,
            own_blocks=self._leased_blocks.astype(INT32),
            copies=self._copies(bases, tables, table_lengths.cumsum() - table_lengths),
        )

    def _copies(self, bases: Array, tables: Array, starts: Array) -> Array:
        """The trunk's block that is partly before each branch and partly beyond; −1 where they part at its end."""
        ends = bases[self.branches.trunks] + self.branches.kept
        size = self._blocks.block_tokens
        copies = np.empty(len(ends), dtype=INT32)
        copies.fill(_NONE)
        partly = (ends % size).nonzero()[0]
        copies[partly] = tables[starts[self.branches.trunks[partly]] + ends[partly] // size]
        return copies

    # ---- what comes

    @property
    def steps(self) -> int:
        """Forwards of the worker."""
        return max(1, len(self._lookup.rows) - 1)

    @property
    def pushed(self) -> int:
        """How many of its first steps the worker has pushed; it pushes in order."""
        return 1 + max(self._seen, default=-1)

    def rows(self, step: int) -> int:
        """Rows of the worker's forward in this step."""
        rows = self._lookup.rows
        return rows[step] if step < len(rows) else 0

    def take(self, push: PushAhead, vocab_size: int) -> bool:
        """Keep what was pushed; false when this push was seen before. Raises ProtocolError for impossible ones."""
        count = len(push.tokens)
        if push.branches.shape != (count,) or push.places.shape != (count,) or push.step < 0:
            raise ProtocolError(f"push {push.step} of plan {push.plan} has columns of unequal length")
        return self._take_few(push, vocab_size) if count <= _FEW else self._take_many(push, vocab_size)

    def _take_few(self, push: PushAhead, vocab_size: int) -> bool:
        """What `_take_many` does, for so few nodes that one by one is quicker."""
        branches, tokens = push.branches.tolist(), push.tokens.tolist()
        columns = [place + 1 for place in push.places.tolist()]
        drafted = len(columns) - columns.count(0)
        if not self._new(push, drafted, self._wrong_of_few(branches, columns, tokens, vocab_size)):
            return False
        numbers, width, row, drawn = self._numbers, self._tokens.shape[1], self._dist_count, self._drawn
        dist_rows = self._tokens.size  # they begin there
        for branch, column, token in zip(branches, columns, tokens, strict=True):
            at = branch * width + column
            numbers[at] = token
            if column and drawn:
                numbers[dist_rows + at] = row
                row += 1
        self._keep(push.dists, drafted)
        return True

    def _take_many(self, push: PushAhead, vocab_size: int) -> bool:
        """Put pushed tokens where they belong and, where they were drawn, the number of the dist of each."""
        columns = push.places + 1  # 0 for guesses
        drafted = int(np.count_nonzero(columns))
        if not self._new(push, drafted, self._wrong(push, columns, vocab_size)):
            return False
        at = push.branches, columns
        self._tokens[at] = push.tokens
        if drafted and self._drawn:
            if drafted < len(columns):
                where = columns.nonzero()[0]
                at = push.branches[where], columns[where]
            self._dist_rows[at] = np.arange(self._dist_count, self._dist_count + drafted)
        self._keep(push.dists, drafted)
        return True

    def _new(self, push: PushAhead, drafted: int, wrong: str | None) -> bool:
        """Note that this push came, unless it was seen before. Raises ProtocolError if something is wrong with it."""
        if wrong is not None:
            raise ProtocolError(f"push {push.step} of plan {push.plan} {wrong}")
        dists = len(push.dists.rows)
        if dists not in (0, drafted) or (drafted and self._drawn not in (None, dists > 0)):
            raise ProtocolError(f"push {push.step} of plan {push.plan} has {dists} dists for {drafted} drafted tokens")
        if push.step in self._seen:
            return False
        self._seen.add(push.step)
        self.busy_s += push.busy_s
        if drafted:
            self._drawn = dists > 0
        return True

    def _keep(self, dists: Dists, drafted: int) -> None:
        if len(dists.rows):
            self._dist_count += drafted
            self._pushed.append(dists)

    def _wrong_of_few(
        self, branches: Sequence[int], columns: Sequence[int], tokens: Sequence[int], vocab_size: int
    ) -> str | None:
        """What `_wrong` says, for so few nodes that to look at each is quicker."""
        depths = self._lookup.depths
        for branch, column, token in zip(branches, columns, tokens, strict=True):
            if not 0 <= branch < len(depths):
                return _UNPLANNED
            if not 0 <= column <= depths[branch]:
                return _TOO_LONG
            if not 0 <= token < vocab_size:
                return _UNKNOWN
        return None

    def _wrong(self, push: PushAhead, columns: Array, vocab_size: int) -> str | None:
        """What no worker may push. As unsigned numbers, negative ones are too large as well; to count is quickest."""
        if np.count_nonzero(push.branches.astype(np.uint64) >= len(self.branches)):
            return _UNPLANNED
        if np.count_nonzero(columns.astype(np.uint64) > self._lookup.longest.take(push.branches)):
            return _TOO_LONG
        if np.count_nonzero(push.tokens.astype(np.uint64) >= vocab_size):
            return _UNKNOWN
        return None

    @property
    def _deepest(self) -> int:
        """Tokens that the deepest branch may have drafted."""
        deepest: int = self._tokens.shape[1] - 2
        return deepest

    @property
    def slots_left(self) -> int:
        """Leased slots that no request took over."""
        return self._slots_left.count(1)

    # ---- what comes true

    def trunk_of(self, state: RequestState, base: int) -> int | None:
        """The request's trunk behind so many committed tokens, by number; None if it has no branches, or left."""
        index = self._by_row.get(state.row)
        if index is None:
            return None
        trunk = self.trunks[index]
        if trunk.base != base or trunk.epoch != state.epoch or trunk.gone:
            return None
        return index if self._first_branches[index] < self._first_branches[index + 1] else None

    def find(self, outcomes: Iterable[tuple[int, int, int]]) -> tuple[list[tuple[int, int]], list[Guess]]:
        """What these outcomes (a trunk, tokens kept, the next token) make true, and what became of the guesses there.

        A guess that was not told in time was not wrong: it says nothing about how good guesses are. One that repeats
        another adds nothing to it, so it is never right. Returns (trunk, branch) for each outcome that was foreseen.
        """
        guessed, known = self._tokens[:, 0].tolist(), self._lookup
        true, guesses = [], []
        for trunk, kept, token in outcomes:
            whole, foreseen = kept == len(self.trunks[trunk].chain.tokens), False
            for branch in range(self._first_branches[trunk], self._first_branches[trunk + 1]):
                if known.kept[branch] == kept and guessed[branch] != _NONE:
                    right = not foreseen and guessed[branch] == token
                    guesses.append(guess(whole, known.ranks[branch], right))
                    if right:
                        foreseen = True
                        true.append((trunk, branch))
        return true, guesses

    def adopt(self, true: Sequence[tuple[int, int]]) -> None:
        """Hand each branch over to its trunk's request: the chain beyond its guess, its table, and what is cached.

        A branch for which nothing came yet is not handed over.
        """
        branches = [branch for _, branch in true]
        dists, width = self._dists_of(branches), self._deepest
        known = self._lookup
        columns = (self._tokens, known.slot_starts, known.block_starts, known.block_ends)
        rows = zip(true, *(column[branches].tolist() for column in columns), strict=True)
        tails: list[int] = []
        for place, ((index, branch), tokens, at, *own) in enumerate(rows):
            length = tokens.index(_NONE, 1) - 1
            if length == 0:
                continue
            trunk = self.trunks[index]
            state, end = trunk.state, trunk.base + known.kept[branch]
            coming = length < known.depths[branch]  # one more is on its way
            taken = length + coming
            slots = self._leased_slots[at : at + taken].tolist()
            self._slots_left[at : at + taken] = bytes(taken)
            behind = slots.pop() if coming else None
            row = place * width
            drafted = tokens[1 : length + 1]
            state.chain = Chain(drafted, slots, length - 1, dists, row, next_slot=behind, plan=self.number)
            state.draft_cached = end + length  # with the guess, and without the last drafted token
            tails += self._adopt_table(state, end // self._blocks.block_tokens, *own)
        self._blocks.free(tails)

    def _dists_of(self, branches: Sequence[int]) -> Dists | None:
        """The dists of these branches, one behind the other with room for the deepest; None where nothing was drawn."""
        if not self._pushed:
            return None
        form, width, size = self._pushed[0].form, self._pushed[0].width, self._pushed[0].rows.shape[1]
        wanted = self._dist_rows[branches, 1:-1].ravel()
        if self._dist_count <= _MOSTLY * len(wanted) or self._dist_count * size <= _SMALL:
            return Dists(form, width, np.concatenate([dists.rows for dists in self._pushed]).take(wanted, axis=0))
        picked = np.empty((len(wanted), size), dtype=np.uint8)
        in_turn = wanted.argsort()  # push by push, behind what did not come
        firsts = [0, *accumulate([len(dists.rows) for dists in self._pushed])]
        spans = pairwise(wanted.searchsorted(firsts, sorter=in_turn).tolist())
        for dists, first, (begin, end) in zip(self._pushed, firsts, spans, strict=False):
            here = in_turn[begin:end]
            picked[here] = dists.rows.take(wanted[here] - first, axis=0)
        return Dists(form, width, picked)

    def _adopt_table(self, state: RequestState, shared: int, begin: int, end: int) -> list[int]:
        """Put leased blocks begin … end − 1 behind those shared with the trunk; returns the blocks that they replace.

        These may go at once, although the worker may still write to them: it does what it is told in order, so
        whoever is given them next writes later.
        """
        tail = self._blocks.trim(state.draft_table, shared * self._blocks.block_tokens)
        state.draft_table.extend(self._leased_blocks[begin:end].tolist())
        self._blocks_left[begin:end] = bytes(end - begin)
        return tail

    def leave(self, state: RequestState) -> None:
        """The request ended, or lost its place."""
        index = self._by_row.get(state.row)
        if index is not None:
            self.trunks[index].gone = True

    def release(self) -> None:
        """Give back all that no request took over."""
        self._slots.give_back(self._leased_slots[np.frombuffer(self._slots_left, dtype=np.bool_)])
        self._blocks.give_back(self._leased_blocks[np.frombuffer(self._blocks_left, dtype=np.bool_)])


def _rows_by_step(branches: Branches, trunks: int) -> list[int]:
    """Rows of the worker's forwards: the trunks and the branches that begin with them, then those that have begun."""
    ended = np.bincount(branches.firsts + branches.depths, minlength=1)
    begun = np.bincount(branches.firsts, minlength=len(ended))  # each begins before it ends
    rows: list[int] = (begun - ended).cumsum().tolist()
    return [rows[0] + trunks, *rows[1:]]
