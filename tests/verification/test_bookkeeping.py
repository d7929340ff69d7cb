"""Megatron-LM's verify_speculative_tokens and prepare_next_forward_pass, by their own worked examples and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.verification.bookkeeping import (
    NextPass,
    fixed_stride,
    prepare_next_forward_pass,
    verify_speculative_tokens,
)

# The example of the original's documentation: S = 2, three decode rows, two prefill rows.
READ = np.array([10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 50])
CHOSEN = np.array([11, 77, 78, 21, 22, 23, 35, 32, 33, 41, 51])
LENGTHS = fixed_stride(3, 2, 2)
LAST = [1, 5, 6, 9, 10]
MASK = [1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1]


def prepared(read, chosen, lengths, depth, *, due=None, positions=None, rows=None, dirt=-7777) -> NextPass:
    """What a step writes into buffers that hold another step's values."""
    buffers = NextPass.empty(rows or len(lengths), depth)
    for buffer in (buffers.sampled, buffers.last_accepted, buffers.accepted, buffers.counts):
        buffer.fill(dirt)
    due = np.ones(len(lengths), dtype=bool) if due is None else np.array(due)
    positions = np.arange(read.size) if positions is None else np.array(positions)
    last, _ = verify_speculative_tokens(read, chosen, lengths)
    prepare_next_forward_pass(read, chosen, lengths, due, positions, last, buffers)
    return buffers


@pytest.mark.parametrize("read", [READ, READ[None]], ids=["flat", "one row"])
def test_the_documented_example_is_verified(read):
    """Row c: 32 is what the target chose after 31, which was refused; it does not count. Prefill rows are accepted."""
    last, accepted = verify_speculative_tokens(read, CHOSEN, LENGTHS)
    assert last.tolist() == LAST
    assert accepted.astype(int).tolist() == MASK
    assert (last.dtype, accepted.dtype) == (np.int64, np.bool_)


def test_without_the_running_and_an_accidental_match_would_count():
    """A variant that compares each token alone accepts 32 in row c: the example tells the two apart."""
    alone = (np.roll(CHOSEN, 1) == READ).astype(int)
    alone[[0, 3, 6, 9, 10]] = 1
    assert alone.tolist() != MASK
    assert alone[8] == 1


def test_a_base_never_matches_what_another_request_was_told():
    """The token before a base belongs to the row before: equal or not, it changes nothing (no bleed between rows)."""
    for base in (78, 0):
        read = READ.copy()
        read[3] = base  # 78 is what the target chose at the end of row a
        last, accepted = verify_speculative_tokens(read, CHOSEN, LENGTHS)
        assert (last.tolist(), accepted.astype(int).tolist()) == (LAST, MASK)


def test_the_documented_example_is_prepared():
    """Samples, counts, accepted ids and places in the packed sequence; prompts of 5 and 4 tokens show their last."""
    buffers = prepared(READ, CHOSEN, LENGTHS, 2, positions=[*range(9), 13, 17])
    assert buffers.sampled.tolist() == [77, 23, 35, 41, 51]
    assert buffers.accepted.tolist() == [[11, -1], [21, 22], [-1, -1], [-1, -1], [-1, -1]]
    assert buffers.counts.tolist() == [1, 2, 0, 0, 0]
    assert buffers.last_accepted.tolist() == [1, 5, 6, 13, 17]


def test_what_is_emitted_is_the_accepted_tokens_and_the_sample():
    """INV1: 1 … S + 1 tokens, never none."""
    buffers = prepared(READ, CHOSEN, LENGTHS, 2)
    emitted = [
        [*ids[:count], token]
        for ids, count, token in zip(
            buffers.accepted.tolist(), buffers.counts.tolist(), buffers.sampled.tolist(), strict=True
        )
    ]
    assert emitted == [[11, 77], [21, 22, 23], [35], [41], [51]]


def test_the_controllers_example():
    """S = 2: one row keeps all, one keeps nothing."""
    read, chosen = np.array([10, 11, 12, 20, 21, 22]), np.array([11, 12, 99, 99, 22, 23])
    buffers = prepared(read, chosen, fixed_stride(2, 0, 2), 2)
    assert buffers.counts.tolist() == [2, 0]
    assert buffers.accepted.tolist() == [[11, 12], [-1, -1]]


def test_every_row_is_written_and_padding_is_not_touched():
    """Dirty buffers: prefill rows get −1 and 0 afresh, rows past the batch keep whatever they held."""
    buffers = prepared(READ, CHOSEN, LENGTHS, 2, rows=7)
    assert buffers.counts.tolist() == [1, 2, 0, 0, 0, -7777, -7777]
    assert buffers.accepted[3:].tolist() == [[-1, -1], [-1, -1], [-7777, -7777], [-7777, -7777]]
    assert buffers.sampled[5:].tolist() == buffers.last_accepted[5:].tolist() == [-7777, -7777]


def test_rows_that_are_not_due_choose_no_token():
    """A prompt that goes on has no next token, whatever its logits say."""
    buffers = prepared(READ, CHOSEN, LENGTHS, 2, due=[True, True, True, False, True])
    assert buffers.sampled.tolist() == [77, 23, 35, -1, 51]


def test_no_rows_at_all_are_no_error():
    """Zero requests: nothing is written."""
    nothing = np.empty(0, dtype=np.int64)
    last, accepted = verify_speculative_tokens(nothing, nothing, nothing)
    assert len(last) == len(accepted) == 0
    buffers = prepared(nothing, nothing, nothing, 2, rows=2)
    assert buffers.sampled.tolist() == [-7777, -7777]


def test_known_ids_need_no_columns():
    """With S = 0 the accepted ids are left out and everything else is the same."""
    buffers = prepared(READ, CHOSEN, LENGTHS, 0)
    assert buffers.accepted.shape == (5, 0)
    assert (buffers.sampled.tolist(), buffers.counts.tolist()) == ([77, 23, 35, 41, 51], [1, 2, 0, 0, 0])


def by_hand(read: list[int], chosen: list[int], lengths: list[int]) -> tuple[list[int], list[bool]]:
    """The same, a token at a time."""
    last, mask, at = [], [], 0
    for length in lengths:
        kept = 1
        while kept < length and read[at + kept] == chosen[at + kept - 1]:
            kept += 1
        last.append(at + kept - 1)
        mask += [offset < kept for offset in range(length)]
        at += length
    return last, mask


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), max_size=9), st.data())
def test_ragged_rows_agree_with_a_walk_by_hand(lengths, data):
    """Any lengths, a vocabulary of two so that matches are common; the accepted ids are those of the walk."""
    total = sum(lengths)
    ids = st.lists(st.integers(0, 1), min_size=total, max_size=total)
    read, chosen = data.draw(ids), data.draw(ids)
    wanted_last, wanted_mask = by_hand(read, chosen, lengths)
    arrays = [np.array(values, dtype=np.int64) for values in (read, chosen, lengths)]
    last, accepted = verify_speculative_tokens(*arrays)
    assert (last.tolist(), accepted.tolist()) == (wanted_last, wanted_mask)

    buffers = prepared(*arrays, 5)
    begins = [sum(lengths[:row]) for row in range(len(lengths))]
    assert buffers.counts.tolist() == [at - begin for at, begin in zip(wanted_last, begins, strict=True)]
    for begin, at, ids_row in zip(begins, wanted_last, buffers.accepted.tolist(), strict=True):
        kept = read[begin + 1 : at + 1]
        assert ids_row == kept + [-1] * (5 - len(kept))
