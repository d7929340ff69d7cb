"""Megatron-LM's rewind_kv_cache over a batch of array tables: its worked cases, and agreement with single tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.rewind import NO_BLOCK, KvTables, rewind_kv_cache


def ints(values) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def tables(rows: list[list[int]], lengths: list[int], width: int | None = None) -> KvTables:
    """lengths count the positions written, this step's included (the original's kv_length_offsets + query length)."""
    width = width or max((len(row) for row in rows), default=0)
    ids = np.full((len(rows), width), NO_BLOCK, dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return KvTables(ids, ints([len(row) for row in rows]), ints(lengths))


CASES = {
    # Offsets of the last position before: R1 [2, 1], R2 [1, 10], R3 [5, 10, 2, 7], R5 2, R6 0, R7 15, R8 0.
    "R1 row 1 crosses": (4, [[48, 49, 50], [57, 58, 59, 60]], [11, 14], [2, 3], [60], [0, 2], [3, 3], [50, 59]),
    "R2 row 0 crosses": (16, [[10, 20, 50], [15, 25, 35, 60]], [34, 59], [3, 3], [50], [14, 7], [2, 4], [20, 60]),
    "R3 prefill rows": (
        16,
        [[1], [2], [3], [4]],
        [6, 11, 3, 8],
        [2, 0, 1, 0],
        [],
        [3, 10, 1, 7],
        [1] * 4,
        [1, 2, 3, 4],
    ),
    "R5 many blocks": (4, [[10, 20, 30, 40]], [15], [3], [40], [3], [3], [30]),
    "R6 at the edge": (16, [[1, 2]], [17], [1], [2], [15], [1], [1]),
    "R7 no edge": (16, [[1, 2]], [32], [3], [], [12], [2], [2]),
    "R8 two blocks": (4, [[1, 2, 3, 4]], [13], [6], [4, 3], [2], [2], [2]),
    "R9 all kept": (4, [[1, 2]], [7], [0], [], [2], [2], [2]),
}


@pytest.mark.parametrize(
    ("block_tokens", "rows", "lengths", "back", "released", "offsets", "counts", "last"), CASES.values(), ids=CASES
)
def test_worked_cases(block_tokens, rows, lengths, back, released, offsets, counts, last):
    """Only ids that were given up are returned, tail first; offsets, counts and last blocks are those left."""
    batch = tables(rows, lengths)
    assert rewind_kv_cache(batch, ints(back), block_tokens).tolist() == released
    assert batch.last_offsets(block_tokens).tolist() == offsets
    assert batch.counts.tolist() == counts
    assert batch.last_blocks().tolist() == last
    assert batch.lengths.tolist() == [length - by for length, by in zip(lengths, back, strict=True)]
    assert [row[row != NO_BLOCK].tolist() for row in batch.ids] == [
        row[:n] for row, n in zip(rows, counts, strict=True)
    ]


def test_stale_rows_past_the_active_ones_are_neither_read_nor_changed():
    """R1 with its padding: two rows of garbage behind two real ones stay bit for bit, and release nothing."""
    rows = [[48, 49, 50], [57, 58, 59, 60], [777, 777], [888]]
    batch = tables(rows, [11, 14, 9999, -9999])
    stale = (batch.ids[2:], batch.counts[2:], batch.lengths[2:])
    before = [column.copy() for column in stale]
    assert rewind_kv_cache(batch, ints([2, 3, 9999, 5]), 4, active=2).tolist() == [60]
    assert all((left == was).all() for left, was in zip(stale, before, strict=True))
    assert batch.ids[1].tolist() == [57, 58, 59, NO_BLOCK]


def test_megatrons_rule_of_one_block_would_leak():
    """R8: S ≥ B. One block at most is what the original releases; block 3 would then be held by nobody's tokens."""
    batch = tables([[1, 2, 3, 4]], [13])
    offset, back = 0, 6
    crossed = offset - back < 0
    assert crossed
    assert len(rewind_kv_cache(batch, ints([back]), 4)) == 2 > int(crossed)


def test_a_shared_block_loses_one_reference():
    """R4: ids go to the counting pool, which keeps block 20 for its other holder; R1's pool gains one free block."""
    pool = BlockPool(64, 4)
    everything = pool.alloc(64)
    held = [8, 9, 10, 18, 19, 20]
    pool.free([block for block in everything if block not in held])
    pool.retain([20])
    batch = tables([[8, 9, 10], [18, 19, 20]], [10, 9])
    before = pool.free_count
    released = rewind_kv_cache(batch, ints([1, 2]), 4)
    assert batch.last_offsets(4).tolist() == [0, 2]
    assert batch.last_blocks().tolist() == [10, 19]
    assert pool.free(released.tolist()) == []
    assert (pool.count(20), pool.count(10), pool.free_count) == (1, 1, before)
    assert pool.free([20]) == [20]


def test_nothing_to_do_is_no_error():
    """N = 0, and tables without columns."""
    assert rewind_kv_cache(tables([], []), ints([]), 4).tolist() == []
    empty = tables([[]], [0])
    assert rewind_kv_cache(empty, ints([3]), 4).tolist() == []
    assert empty.last_blocks().tolist() == [NO_BLOCK]


ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 50)), max_size=6)


@given(block_tokens=st.integers(1, 7), rows=ROWS, dirt=st.integers(0, 3))
def test_a_batch_is_cut_as_each_table_alone(block_tokens, rows, dirt):
    """Any lengths, lookahead blocks, rewinds, block sizes and stale rows: the engine's `BlockPool.rewind` agrees."""
    pool = BlockPool(1000, block_tokens)
    single: list[list[int]] = []
    for length, ahead, _ in rows:
        single.append([])
        assert pool.cover(single[-1], length + ahead)
    stale = [[NO_BLOCK]] * dirt
    batch = tables([*single, *stale], [row[0] for row in rows] + [99] * dirt)
    back = ints([row[2] for row in rows] + [1] * dirt)
    released = rewind_kv_cache(batch, back, block_tokens, active=len(rows)).tolist()

    alone = [pool.rewind(table, max(0, row[0] - row[2])) for table, row in zip(single, rows, strict=True)]
    assert released == [block for blocks in alone for block in blocks]
    assert [batch.ids[i, : batch.counts[i]].tolist() for i in range(len(rows))] == single
    assert batch.lengths.tolist()[: len(rows)] == [max(0, row[0] - row[2]) for row in rows]
    pool.check()
