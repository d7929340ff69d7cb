"""Slots and blocks: the worked cases of MLC's workspace manager and of Megatron's KV rewind, and random walks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.slots import SlotPool
from specserve.coordinator.trie import NO_SLOT, Nodes, Trie
from specserve.errors import PoolError, ProtocolError


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


def chain(pool: SlotPool, tokens: list[int], parents: list[int]) -> Nodes:
    n = len(tokens)
    return Nodes(tokens, parents, pool.alloc(n), [True] * n, [True] * n)


def test_a_chain_is_the_path_of_first_children():
    """T3: of parents [−1, −1, 0, 0, 1] the first children are taken: node 0, then node 2."""
    pool = SlotPool(8)
    trie = Trie(pool)
    trie.append(chain(pool, [10, 11, 12, 13, 14], [-1, -1, 0, 0, 1]))

    assert [link.token for link in trie.chain(9)] == [10, 12]
    assert [link.token for link in trie.chain(1)] == [10]


def test_guesses_are_never_offered():
    """Only sampled children may be offered to the target; a guess is matched by equality alone."""
    pool = SlotPool(4)
    trie = Trie(pool)
    trie.append(Nodes([5, 6], [-1, -1], pool.alloc(2), [False] * 2, [False, True]))

    assert [link.token for link in trie.chain(4)] == [6]
    assert trie.advance([5]) == 0
    assert pool.held_count == 0


def test_advance_keeps_the_subtree_below_the_committed_path():
    """A committed path cuts its edges at once; the surviving subtree is the next draft."""
    pool = SlotPool(8)
    trie = Trie(pool)
    trie.append(chain(pool, [1, 2, 3, 9], [-1, 0, 1, 0]))

    assert trie.advance([1, 2]) == 2
    assert [link.token for link in trie.chain(9)] == [3]
    assert pool.held_count == 1
    assert trie.advance([4]) == 0
    assert (len(trie), pool.held_count) == (0, 0)


def test_advance_counts_only_nodes_whose_kv_was_written():
    """T8 read with I2: the last drafted token was sampled but never fed."""
    pool = SlotPool(8)
    trie = Trie(pool)
    trie.append(Nodes([1, 2, 3], [-1, 0, 1], pool.alloc(3), [True, True, False], [True] * 3))

    assert trie.advance([1, 2, 3, 50]) == 2
    assert pool.held_count == 0


def test_a_parent_after_its_child_is_refused():
    """A push with impossible links changes nothing."""
    pool = SlotPool(4)
    trie = Trie(pool)
    with pytest.raises(ProtocolError):
        trie.append(Nodes([1, 2], [1, -1], [0, 1], [True] * 2, [True] * 2))

    assert len(trie) == 0


class TrieMachine(RuleBasedStateMachine):
    """Random appends, commits, batches in flight and clears against a plain model of nested paths."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(40)
        self.trie = Trie(self.pool)
        self.paths: set[tuple[int, ...]] = set()
        self.in_flight: list[list[int]] = []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4, unique=True))
    def append_siblings_with_children(self, tokens):
        if self.paths or self.pool.free_count < 2 * len(tokens):
            return
        parents = [-1] * len(tokens) + list(range(len(tokens)))
        slots = self.pool.alloc(2 * len(tokens))
        self.trie.append(Nodes(tokens + [7] * len(tokens), parents, slots, [True] * len(slots), [True] * len(slots)))
        self.paths = {(token,) for token in tokens} | {(token, 7) for token in tokens}

    @rule(tokens=st.lists(st.sampled_from([0, 1, 2, 7]), min_size=1, max_size=3))
    def commit(self, tokens):
        path = tuple(tokens)
        survivors = {
            known[len(path) :] for known in self.paths if known[: len(path)] == path and len(known) > len(path)
        }
        self.trie.advance(tokens)
        self.paths = survivors

    @rule()
    def send(self):
        slots = [link.slot for link in self.trie.chain(4) if link.slot != NO_SLOT]
        self.pool.retain(slots)
        self.in_flight.append(slots)

    @rule()
    def answer(self):
        if self.in_flight:
            self.pool.free(self.in_flight.pop())

    @rule()
    def clear(self):
        self.trie.clear()
        self.paths = set()

    @invariant()
    def holders_add_up(self):
        self.pool.check()
        assert len(self.trie) == len(self.paths)
        if not self.in_flight:
            assert self.pool.held_count == len(self.paths)

    def teardown(self):
        self.trie.clear()
        for slots in self.in_flight:
            self.pool.free(slots)
        assert self.pool.held_count == 0


TestTrie = TrieMachine.TestCase
