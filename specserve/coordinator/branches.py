"""One plan for drafting ahead, and what it has brought: arrays over branches and steps, not an object per node.

The slots and blocks of all branches are leased in one go and come back in one go, but for those of the branches that
came true, which their requests take over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.requests import RequestState
from specserve.coordinator.slots import SlotPool
from specserve.coordinator.trie import ROOT, Link, Nodes
from specserve.errors import ProtocolError
from specserve.transport.messages import Array, Dists, PlanAhead, PushAhead

_NONE = -1


@dataclass(slots=True)
class Branch:
    """One outcome that is drafted for; own blocks follow the trunk's full blocks of its first positions."""

    kept: int
    rank: int
    first: int  # the step in which its guess is fed
    depth: int
    own: int  # blocks


@dataclass(slots=True)
class Trunk:
    """One request's share of a plan: committed tokens and checked chain, fed from `start` on.

    text counts the committed tokens that take part. due: the feed reaches the end of the chain, so that branches may
    leave it. text_start is where the worker's knowledge of the text ends.
    """

    state: RequestState
    epoch: int
    text: int
    start: int
    feed: int
    chain: list[Link]
    due: bool
    text_start: int = 0
    branches: list[Branch] = field(default_factory=list)
    first_branch: int = 0
    gone: bool = False

    @property
    def base(self) -> int:
        """Committed tokens of the text."""
        return min(self.text, self.start + self.feed)

    @property
    def covered(self) -> int:
        """Positions that are cached once the trunk is fed."""
        return self.start + self.feed

    def tokens(self) -> list[int]:
        """The text that is sent, chain included."""
        return self.state.tokens[self.text_start : self.base] + [link.token for link in self.chain]


class AheadPlan:
    """Trunks, their branches, and the tokens that have come for them. `add` all branches, then take the `message`."""

    def __init__(self, number: int, trunks: Sequence[Trunk], sent_s: float, slots: SlotPool, blocks: BlockPool) -> None:
        self.number = number
        self.trunks = trunks
        self.sent_s = sent_s
        self.busy_s = 0.0
        self.over = False  # the worker writes nothing of it any more
        self.settled = False  # the round that it foresaw is over
        self._slots, self._blocks = slots, blocks
        self._free_slots, self._free_blocks = slots.free_count, blocks.free_count
        self._by_row = {int(trunk.state.row): trunk for trunk in trunks}
        self._garbage: list[list[int]] = []  # tables that requests gave up while the worker may write to them
        self._seen: set[int] = set()
        self._found: dict[tuple[int, int, int], int] = {}

    # ---- making it

    def add(self, trunk: Trunk, kept: int, rank: int, first: int, depth: int) -> None:
        """A branch, as deep as the slots allow; none where slots or blocks have run out."""
        depth = min(depth, self._free_slots)
        own = self._own_blocks(trunk.base + kept, depth)
        if depth <= 0 or own > self._free_blocks:
            return
        self._free_slots -= depth
        self._free_blocks -= own
        trunk.branches.append(Branch(kept, rank, first, depth, own))

    def _own_blocks(self, start: int, depth: int) -> int:
        """Blocks that hold the guess at `start` and the drafted tokens after it that are fed."""
        return self._blocks.needed(start + depth) - start // self._blocks.block_tokens

    def message(self) -> PlanAhead:
        """Lease what the branches need, and the plan in columns."""
        trunks = self.trunks
        at = 0
        for trunk in trunks:
            trunk.first_branch = at
            at += len(trunk.branches)
        self._branches = [branch for trunk in trunks for branch in trunk.branches]
        self._trunk_of = _ints([index for index, trunk in enumerate(trunks) for _ in trunk.branches])
        self._kept = _ints([branch.kept for branch in self._branches])
        self._depths = _ints([branch.depth for branch in self._branches])
        self._firsts = _ints([branch.first for branch in self._branches])
        own_lengths = [branch.own for branch in self._branches]
        self._leased_slots = self._slots.alloc(int(self._depths.sum()))
        self._leased_blocks = self._blocks.alloc(sum(own_lengths))
        self._slot_starts = _starts(self._depths.tolist())
        self._block_starts = _starts(own_lengths)
        widest = 1 + (int(self._depths.max()) if len(self._depths) else 0)
        self._tokens = np.full((at, widest), _NONE, dtype=np.int32)
        self._dist_push = np.full((at, widest), _NONE, dtype=np.int32)
        self._dist_row = np.zeros((at, widest), dtype=np.int32)
        self._pushed: list[Dists] = []
        self._kept_slots: list[tuple[int, int]] = []  # spans of leases that requests took over
        self._kept_blocks: list[tuple[int, int]] = []
        return self._columns(own_lengths)

    def _columns(self, own_lengths: list[int]) -> PlanAhead:
        trunks, texts = self.trunks, [trunk.tokens() for trunk in self.trunks]
        tables = [trunk.state.draft_table for trunk in trunks]
        return PlanAhead(
            plan=self.number,
            rows=np.array([trunk.state.row for trunk in trunks], dtype=np.int64),
            epochs=_ints([trunk.epoch for trunk in trunks]),
            bases=_ints([trunk.base for trunk in trunks]),
            text_starts=_ints([trunk.text_start for trunk in trunks]),
            text_lengths=_ints([len(text) for text in texts]),
            texts=_flat(texts),
            starts=_ints([trunk.start for trunk in trunks]),
            chain_lengths=_ints([len(trunk.chain) for trunk in trunks]),
            chain_slots=_flat([[link.slot for link in trunk.chain] for trunk in trunks]),
            table_lengths=_ints([len(table) for table in tables]),
            tables=_flat(tables),
            branch_counts=_ints([len(trunk.branches) for trunk in trunks]),
            parents=self._kept,
            ranks=_ints([branch.rank for branch in self._branches]),
            firsts=self._firsts,
            depths=self._depths,
            slots=_ints(self._leased_slots),
            own_lengths=_ints(own_lengths),
            own_blocks=_ints(self._leased_blocks),
            copies=_ints([self._copied(trunk, branch) for trunk in trunks for branch in trunk.branches]),
        )

    def _copied(self, trunk: Trunk, branch: Branch) -> int:
        """The trunk's block that is partly before the branch and partly beyond; −1 where they part at its end."""
        block, within = divmod(trunk.base + branch.kept, self._blocks.block_tokens)
        return trunk.state.draft_table[block] if within else _NONE

    # ---- what comes

    def rows(self, step: int) -> int:
        """Rows of the worker's forward in this step."""
        started = (self._firsts <= step) & (step < self._firsts + self._depths)
        return int(started.sum()) + (len(self.trunks) if step == 0 else 0)

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
        guessed = push.branches[push.places < 0]
        keys = zip(
            self._trunk_of[guessed].tolist(),
            self._kept[guessed].tolist(),
            push.tokens[push.places < 0].tolist(),
            strict=True,
        )
        self._found.update(zip(keys, guessed.tolist(), strict=True))
        return True

    def _check(self, push: PushAhead, vocab_size: int) -> None:
        count = len(push.tokens)
        if push.branches.shape != (count,) or push.places.shape != (count,) or push.step < 0:
            raise ProtocolError(f"push {push.step} of plan {push.plan} has columns of unequal length")
        if not count:
            return
        if push.branches.min() < 0 or push.branches.max() >= len(self._branches):
            raise ProtocolError(f"push {push.step} of plan {push.plan} names branches that were not planned")
        if push.places.min() < _NONE or (push.places >= self._depths[push.branches]).any():
            raise ProtocolError(f"push {push.step} of plan {push.plan} has chains longer than their leases")
        if push.tokens.min() < 0 or push.tokens.max() >= vocab_size:
            raise ProtocolError(f"push {push.step} of plan {push.plan} has tokens outside the vocabulary")
        drawn = int((push.places >= 0).sum())
        if len(push.dists.rows) not in (0, drawn):
            raise ProtocolError(f"push {push.step} of plan {push.plan} has {len(push.dists.rows)} dists for {drawn}")

    # ---- what comes true

    def trunk_of(self, state: RequestState) -> Trunk | None:
        """The request's share, unless it left."""
        trunk = self._by_row.get(state.row)
        return trunk if trunk is not None and not trunk.gone and trunk.epoch == state.epoch else None

    def tried(self, trunk: Trunk, kept: int) -> list[int]:
        """The ranks for which branches leave after so many chain tokens."""
        return [branch.rank for branch in trunk.branches if branch.kept == kept]

    def find(self, trunk: Trunk, kept: int, token: int) -> int | None:
        """The branch of this outcome, by its number."""
        if not trunk.branches:
            return None
        return self._found.get((int(self._trunk_of[trunk.first_branch]), kept, token))

    def rank(self, branch: int) -> int:
        """The rank of a branch's guess."""
        return self._branches[branch].rank

    def adopt(self, trunk: Trunk, index: int) -> Nodes | None:
        """Hand a branch over to its request: the chain beyond its guess, and its table. None when nothing came yet."""
        branch, row = self._branches[index], self._tokens[index].tolist()
        length = next((place for place in range(branch.depth) if row[place + 1] == _NONE), branch.depth)
        if length == 0:
            return None
        slot_start, block_start = self._slot_starts[index], self._block_starts[index]
        self._kept_slots.append((slot_start, slot_start + length))
        self._kept_blocks.append((block_start, block_start + branch.own))
        self._adopt_table(trunk, branch, self._leased_blocks[block_start : block_start + branch.own])
        return Nodes(
            tokens=row[1 : length + 1],
            parents=range(ROOT, length - 1),
            slots=self._leased_slots[slot_start : slot_start + length],
            fed=[place < length - 1 for place in range(length)],
            sampled=[True] * length,
            dists=self._dists(index, length),
        )

    def _dists(self, index: int, length: int) -> list[tuple[Dists | None, int]]:
        pushes, rows = self._dist_push[index].tolist(), self._dist_row[index].tolist()
        places = range(1, length + 1)
        return [(None if pushes[at] == _NONE else self._pushed[pushes[at]], rows[at]) for at in places]

    def _adopt_table(self, trunk: Trunk, branch: Branch, own: list[int]) -> None:
        state = trunk.state
        shared = state.draft_table[: (trunk.base + branch.kept) // self._blocks.block_tokens]
        self._blocks.retain(shared)
        self._give_up(state)
        state.draft_table = shared + own

    def _give_up(self, state: RequestState) -> None:
        """The request no longer needs its table; it goes back when the worker is done with it."""
        if self.over:
            self._blocks.clear(state.draft_table)
        else:
            self._garbage.append(state.draft_table)
            state.draft_table = []

    def leave(self, state: RequestState) -> None:
        """The request ended, or lost its place."""
        trunk = self.trunk_of(state)
        if trunk is not None:
            trunk.gone = True
            self._give_up(state)

    def release(self) -> None:
        """Give back all that no request took over."""
        self._slots.free(_without(self._leased_slots, self._kept_slots))
        self._blocks.free(_without(self._leased_blocks, self._kept_blocks))
        for table in self._garbage:
            self._blocks.clear(table)


def _without(items: list[int], spans: list[tuple[int, int]]) -> list[int]:
    """The items outside of the spans."""
    left, at = [], 0
    for begin, end in sorted(spans):
        left += items[at:begin]
        at = end
    return left + items[at:]


def _starts(lengths: Sequence[int]) -> list[int]:
    at, starts = 0, []
    for length in lengths:
        starts.append(at)
        at += length
    return starts


def _ints(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int32)


def _flat(lists: Sequence[Sequence[int]]) -> Array:
    return np.array([value for values in lists for value in values], dtype=np.int32)
