"""Columns of a message to rows, and rows to one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from specserve.errors import ProtocolError
from specserve.models import RaggedBatch, TokenTree

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Stretch:
    """Tokens of one row, in order from absolute position `start`; `wanted` last ones must show logits.

    owner is the request's number, for backends that keep state per row. tree: the tokens from its root on are nodes.
    seen: of so many last ones the hidden states are read, where they are observed; None where that may be all.
    """

    start: int
    tokens: Array | Sequence[int]
    table: Array
    wanted: int
    owner: int = -1
    tree: TokenTree | None = None
    seen: int | None = None


def split(name: str, values: Array, lengths: Array) -> list[Array]:
    """Cut a flat column into rows. Raises ProtocolError when the lengths do not add up to it."""
    counts = lengths.tolist()
    ends = [0, *accumulate(counts)]
    if min(counts, default=0) < 0 or ends[-1] != len(values):
        raise ProtocolError(f"{name}: lengths {counts} do not add up to its {len(values)} values")
    return [values[begin:end] for begin, end in pairwise(ends)]


def one_length(**columns: Array) -> int:
    """The common length of per-row columns. Raises ProtocolError when they differ."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise ProtocolError(f"columns of different lengths: {lengths}")
    return next(iter(lengths.values()))


def tokens_in_range(tokens: Array, vocab_size: int) -> None:
    """Raise ProtocolError for a token that no embedding row belongs to."""
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        raise ProtocolError(f"tokens from {tokens.min()} to {tokens.max()} do not fit a vocabulary of {vocab_size}")


def table_covers(table: Array, positions: int, block_tokens: int) -> None:
    """Raise ProtocolError for a table too short for its row: what it lacks would be written to a block of others."""
    needed = -(-positions // block_tokens)
    if len(table) < needed:
        raise ProtocolError(f"a table of {len(table)} blocks for {positions} positions, which take {needed}")


def stretches_of(batch: RaggedBatch) -> list[Stretch]:
    """The rows of a batch whose wanted tokens are each row's last ones, as `ragged` makes them."""
    spans = list(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True))
    wanted = np.diff(np.searchsorted(batch.wanted, batch.offsets)).tolist()
    return [
        Stretch(
            int(batch.positions[begin]),
            batch.tokens[begin:end],
            batch.tables[row],
            wanted[row],
            owner,
            batch.trees.get(row),
        )
        for row, ((begin, end), owner) in enumerate(zip(spans, batch.owners.tolist(), strict=True))
    ]


def ragged(stretches: Sequence[Stretch]) -> RaggedBatch:
    """One batch of these rows, in order; none of them may be empty."""
    numbers = [(len(s.tokens), s.wanted, len(s.tokens) if s.seen is None else s.seen) for s in stretches]
    lengths, wanted, seen = np.array(numbers, dtype=np.int64).reshape(-1, 3).T
    tables = np.zeros((len(stretches), max(len(s.table) for s in stretches)), dtype=np.int32)
    for row, stretch in zip(tables, stretches, strict=True):
        row[: len(stretch.table)] = stretch.table
    starts, owners = np.array([(s.start, s.owner) for s in stretches], dtype=np.int64).T
    ends = lengths.cumsum()
    return RaggedBatch(
        tokens=np.concatenate([s.tokens for s in stretches], dtype=np.int64, casting="unsafe"),
        positions=_runs(starts, lengths, ends),
        offsets=np.concatenate([_ZERO, ends]),
        tables=tables,
        wanted=_runs(ends - wanted, wanted, wanted.cumsum()),
        owners=owners,
        trees={row: s.tree for row, s in enumerate(stretches) if s.tree is not None},
        seen=_runs(ends - seen, seen, seen.cumsum()),
    )


_ZERO = np.zeros(1, dtype=np.int64)


def _runs(starts: Array, lengths: Array, ends: Array) -> Array:
    """Runs of consecutive numbers, one behind the other; ends are the running sums of their lengths."""
    runs: Array = np.arange(ends[-1]) + (starts - ends + lengths).repeat(lengths)
    return runs
