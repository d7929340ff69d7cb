"""Slots and blocks: the worked cases of MLC's workspace manager and of Megatron's KV rewind, and random walks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.slots import SlotPool
from specserve.errors import PoolError


def test_slots_come_last_freed_first():
    """T1: ids are handed out as a stack."""
    pool = SlotPool(8)

    assert pool.alloc(3) == [7, 6, 5]
    assert pool.free([6]) == [6]
    assert pool.alloc(2) == [6, 4]
    assert pool.free_count == 4


@pytest.mark.parametrize(
    "attempt",
    [
        lambda pool: pool.alloc(9),
        lambda pool: pool.alloc(-1),
        lambda pool: pool.alloc(2, [1]),
        lambda pool: pool.alloc(2, [1, 0]),
        lambda pool: pool.free([0]),
        lambda pool: pool.free([7, 7]),
        lambda pool: pool.free([7, 99]),
        lambda pool: pool.retain([7, 0]),
    ],
)
def test_an_impossible_call_changes_nothing(attempt):
    """T1: every refused call leaves the pool exactly as it was."""
    pool = SlotPool(8)
    assert pool.alloc(1) == [7]

    with pytest.raises(PoolError):
        attempt(pool)

    pool.check()
    assert (pool.held_count, pool.count(7)) == (1, 1)
    assert pool.alloc(7) == [6, 5, 4, 3, 2, 1, 0]


def test_a_count_of_two_needs_two_frees():
    """T1 and T2: a slot that two readers share returns after the second, and a third free is an error."""
    pool = SlotPool(8)
    (slot,) = pool.alloc(1, [2])

    assert pool.free([slot]) == []
    assert pool.free([slot]) == [slot]
    with pytest.raises(PoolError):
        pool.free([slot])


def test_shared_drafts_free_their_slots_once():
    """T2: drafts with slots [5, 5, 6] give back {5, 6} once, in one call."""
    pool = SlotPool(8)
    assert pool.alloc(3) == [7, 6, 5]
    pool.retain([5])

    assert pool.free([5, 5, 6]) == [5, 6]


class RewindCase:
    def __init__(self, block_tokens: int, tables: list[list[int]], lengths: list[int]) -> None:
        self.pool = BlockPool(1000, block_tokens)
        held = sorted({block for table in tables for block in table})
        everything = self.pool.alloc(1000)
        self.pool.free([block for block in everything if block not in held])
        for table in tables[1:]:
            shared = [block for block in table if block in tables[0]]
            self.pool.retain(shared)
        self.tables, self.lengths = tables, lengths

    def rewind(self, by: list[int]) -> list[list[int]]:
        return [
            self.pool.rewind(table, length - back)
            for table, length, back in zip(self.tables, self.lengths, by, strict=True)
        ]


@pytest.mark.parametrize(
    ("block_tokens", "tables", "totals", "by", "released", "left"),
    [
        # R1: row 1 crosses back over a block edge, row 0 stays inside its last block
        (4, [[48, 49, 50], [57, 58, 59, 60]], [11, 14], [2, 3], [[], [60]], [[48, 49, 50], [57, 58, 59]]),
        # R2: row 0 crosses
        (16, [[10, 20, 50], [15, 25, 35, 60]], [34, 59], [3, 3], [[50], []], [[10, 20], [15, 25, 35, 60]]),
        # R3: prefill rows (rewound by 0) are untouched
        (16, [[1, 2], [3]], [22, 11], [2, 0], [[], []], [[1, 2], [3]]),
        # R5: only the tail block goes although many are held
        (4, [[10, 20, 30, 40]], [15], [3], [[40]], [[10, 20, 30]]),
        # R6: exactly at the edge
        (16, [[1, 2]], [17], [1], [[2]], [[1]]),
        # R7: no edge crossed
        (16, [[1, 2]], [32], [3], [[]], [[1, 2]]),
        # R8: more drafts than a block holds: two blocks go, tail first
        (4, [[1, 2, 3, 4]], [13], [6], [[4, 3]], [[1, 2]]),
        # R9: everything kept
        (4, [[1, 2]], [7], [0], [[]], [[1, 2]]),
    ],
)
def test_rewind_releases_exactly_the_blocks_past_the_new_end(block_tokens, tables, totals, by, released, left):
    """R1–R3, R5–R9 of Megatron's rewind_kv_cache, by the general rule for any number of blocks."""
    case = RewindCase(block_tokens, tables, totals)

    assert case.rewind(by) == released
    assert case.tables == left
    case.pool.check()


def test_rewind_of_a_shared_block_drops_one_reference():
    """R4: a block with two holders stays held by the other one."""
    pool = BlockPool(32, 4)
    first = [8, 9, 10]
    second = [18, 19, 20]
    everything = pool.alloc(32)
    pool.free([block for block in everything if block not in first + second])
    pool.retain([20])

    assert pool.rewind(first, 10) == []
    assert pool.rewind(second, 8) == []
    assert (second, pool.count(20), pool.count(10)) == ([18, 19], 1, 1)


@given(block_tokens=st.integers(1, 7), total=st.integers(0, 60), back=st.integers(0, 60))
def test_rewind_agrees_with_brute_force(block_tokens, total, back):
    """For any block size and rewind, what stays is the blocks that hold a remaining position."""
    pool = BlockPool(64, block_tokens)
    table: list[int] = []
    assert pool.cover(table, total)
    new = max(0, total - back)
    wanted = [table[i] for i in range(len(table)) if any(p // block_tokens == i for p in range(new))]

    pool.rewind(table, new)

    assert table == wanted
    assert pool.held_count == len(wanted)


def test_cover_is_all_or_nothing():
    """A table that cannot be covered keeps its length and the pool its blocks."""
    pool = BlockPool(3, 4)
    table: list[int] = []

    assert not pool.cover(table, 13)
    assert (table, pool.free_count) == ([], 3)
    assert pool.cover(table, 12)
    assert pool.free_count == 0


@pytest.mark.parametrize("spoil", [[], [299], [-1], [300], [50]], ids=["good", "twice", "negative", "beyond", "free"])
@pytest.mark.parametrize("call", ["retain", "free"])
def test_many_ids_are_counted_as_they_are_one_by_one(call, spoil) -> None:
    """What comes back, in which order, what is refused, and what the pool holds then."""
    together, apart = SlotPool(300), SlotPool(300)
    held = together.alloc(200)
    assert apart.alloc(200) == held
    shared = held[::2]
    together.retain(shared)
    apart.retain(shared)
    named = [*held[::-1], *spoil]

    def one_by_one() -> list[int]:
        return [place for each in named for place in getattr(apart, call)([each]) or ()]

    if spoil in ([], [299]):
        assert (getattr(together, call)(named) or []) == one_by_one()
        assert [together.count(place) for place in range(300)] == [apart.count(place) for place in range(300)]
        assert together.alloc(100) == apart.alloc(100)
    else:
        with pytest.raises(PoolError):
            getattr(together, call)(named)
        assert [together.count(place) for place in range(300)] == [apart.count(place) for place in range(300)]


@pytest.mark.parametrize("spoil", [[], [299], [-1], [300], [50]], ids=["good", "twice", "negative", "beyond", "free"])
def test_many_ids_of_an_array_are_held_and_go_back_as_they_would_one_by_one(spoil) -> None:
    """An id that is named twice, or not held, changes nothing."""
    together, apart = SlotPool(300), SlotPool(300)
    leased = together.lease(200)
    assert apart.alloc(200) == leased.tolist()
    if spoil:
        with pytest.raises(PoolError):
            together.hold(np.concatenate([leased, spoil]))
        with pytest.raises(PoolError):
            together.give_back(np.concatenate([leased, spoil]))
    together.hold(leased)
    apart.retain(leased.tolist())
    together.give_back(leased)
    apart.free(leased.tolist())
    together.check()
    assert [together.count(place) for place in range(300)] == [apart.count(place) for place in range(300)]
    together.give_back(leased)
    apart.free(leased.tolist())
    together.check()
    assert together.alloc(300) == apart.alloc(300)


class PoolMachine(RuleBasedStateMachine):
    """Random calls, possible and impossible ones, against a plain count of references and a plain stack."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(12)
        self.free, self.counts = list(range(12)), [0] * 12

    @rule(n=st.integers(0, 13), as_array=st.booleans())
    def take(self, n, as_array):
        if n > len(self.free):
            with pytest.raises(PoolError):
                self.pool.lease(n)
            return
        expected = [self.free.pop() for _ in range(n)]
        for place in expected:
            self.counts[place] = 1
        assert (self.pool.lease(n).tolist() if as_array else self.pool.alloc(n)) == expected

    @rule(places=st.lists(st.integers(-1, 12), max_size=6))
    def retain(self, places):
        if any(not 0 <= place < 12 or not self.counts[place] for place in places):
            with pytest.raises(PoolError):
                self.pool.retain(places)
            return
        self.pool.retain(places)
        for place in places:
            self.counts[place] += 1

    @rule(places=st.lists(st.integers(-1, 12), max_size=6))
    def give_back(self, places):
        if any(not 0 <= place < 12 or self.counts[place] < places.count(place) for place in places):
            with pytest.raises(PoolError):
                self.pool.free(places)
            return
        for place in places:
            self.counts[place] -= 1
        released = [p for i, p in enumerate(places) if not self.counts[p] and p not in places[i + 1 :]]
        assert self.pool.free(places) == released
        self.free += released

    def done_with_an_array(self, call, places):
        """Whether the call could be done, with distinct ids that are all held; with others it must raise."""
        ids = np.array(places, dtype=np.int64)
        if len(set(places)) < len(places) or not all(0 <= place < 12 and self.counts[place] for place in places):
            with pytest.raises(PoolError):
                call(ids)
            return False
        call(ids)
        return True

    @rule(places=st.lists(st.integers(-1, 12), max_size=12))
    def hold_an_array(self, places):
        if not self.done_with_an_array(self.pool.hold, places):
            return
        for place in places:
            self.counts[place] += 1

    @rule(places=st.lists(st.integers(-1, 12), max_size=12))
    def give_an_array_back(self, places):
        if not self.done_with_an_array(self.pool.give_back, places):
            return
        for place in places:
            self.counts[place] -= 1
        self.free += [place for place in places if not self.counts[place]]

    @invariant()
    def counts_and_stack_agree(self):
        self.pool.check()
        assert [self.pool.count(place) for place in range(12)] == self.counts
        assert self.pool.free_count == len(self.free)


TestPool = PoolMachine.TestCase


@pytest.mark.parametrize("damage", ["a held id on the stack", "a negative count", "a lost id"])
def test_check_notices_a_damaged_pool(damage):
    """Every id is free or held, never both and never neither: each way of breaking that is found."""
    pool = SlotPool(4)
    pool.alloc(2)
    pool.check()
    match damage:
        case "a held id on the stack":
            pool._free[0] = 3
        case "a negative count":
            pool._counts[0] = -1
        case _:
            pool._free.pop()

    with pytest.raises(PoolError):
        pool.check()
