"""Columns of a message to rows, and rows to one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specserve.errors import ProtocolError
from specserve.models import RaggedBatch, TokenTree

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens of one row, in order from absolute position `start`; `wanted` last ones must show logits.

    owner is the request's number, for backends that keep state per row. tree: the tokens from its root on are nodes.
    """

    start: int
    tokens: Array | Sequence[int]
    table: Array
    wanted: int
    owner: int = -1
    tree: TokenTree | None = None


def split(name: str, values: Array, lengths: Array) -> list[Array]:
    """Cut a flat column into rows. Raises ProtocolError when the lengths do not add up to it."""
    if (lengths < 0).any() or int(lengths.sum()) != len(values):
        raise ProtocolError(f"{name}: lengths {lengths.tolist()} do not add up to its {len(values)} values")
    return np.split(values, np.cumsum(lengths)[:-1])


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
    lengths = np.array([len(s.tokens) for s in stretches], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tables = np.zeros((len(stretches), max(len(s.table) for s in stretches)), dtype=np.int32)
    for row, stretch in enumerate(stretches):
        tables[row, : len(stretch.table)] = stretch.table
    ends = offsets[1:].tolist()
    return RaggedBatch(
        tokens=np.concatenate([np.asarray(s.tokens, dtype=np.int64) for s in stretches]),
        positions=np.concatenate([np.arange(s.start, s.start + len(s.tokens)) for s in stretches]),
        offsets=offsets,
        tables=tables,
        wanted=np.concatenate([np.arange(end - s.wanted, end) for end, s in zip(ends, stretches, strict=True)]),
        owners=np.array([s.owner for s in stretches], dtype=np.int64),
        trees={row: s.tree for row, s in enumerate(stretches) if s.tree is not None},
    )
