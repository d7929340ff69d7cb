"""KV pages that hold digests of histories instead of keys and values, and refuse to read what is not there.

The slot of a position holds a 64-bit digest of all tokens up to it. A block also knows how many of its slots are
written, and the digest of what came before it. So a row's whole history is checked block by block, and a table, a
position or a feed that is wrong anywhere makes an error instead of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specserve.errors import ProtocolError
from specserve.models import RaggedBatch
from specserve.models._hash_language import Words, mix

Array = npt.NDArray[Any]

_TOKEN_SPREAD = np.uint64(0xD1342543DE82EF95)  # odd: tokens and positions of any size stay apart


@dataclass(frozen=True, slots=True)
class _Flat:
    """A batch by token [T]: block, offset in it, and row; starts of the rows [n] and the rows' first tokens [n]."""

    blocks: Array
    offsets: Array
    rows: Array
    starts: Array
    begins: Array


class DigestPages:
    """`blocks` blocks of `block_tokens` positions. Memory is 8 bytes per position and 16 per block."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._digests = np.zeros((blocks, block_tokens), dtype=np.uint64)
        self._parents = np.zeros(blocks, dtype=np.uint64)
        self._filled = np.zeros(blocks, dtype=np.int64)

    def write(self, batch: RaggedBatch) -> Words:
        """Write a batch; returns the digests uint64 [T] of the histories that end with its tokens.

        What another history left in a slot is void, and so is what lay past it in its block; a slot that is written
        again with what it holds leaves the rest of its block as it is. Raises ProtocolError, with nothing written, for
        a row that is empty, jumps, starts after positions that its blocks do not hold, or shares a block that it
        writes with another row of the batch.
        """
        flat = self._flat(batch)
        before = self._before(batch, flat)
        spread = mix(batch.tokens.astype(np.uint64) * _TOKEN_SPREAD ^ mix(batch.positions.astype(np.uint64)))
        total = spread.cumsum(dtype=np.uint64)
        digests: Words = total + (before - (total - spread)[flat.begins])[flat.rows]
        self._store(flat, digests, digests - spread)
        return digests

    def _flat(self, batch: RaggedBatch) -> _Flat:
        lengths = np.diff(batch.offsets)
        if not len(lengths) or lengths.min() < 1:
            raise ProtocolError(f"a batch of rows with {lengths.tolist()} tokens; each needs at least one")
        rows = np.repeat(np.arange(len(lengths)), lengths)
        begins = batch.offsets[:-1]
        starts = batch.positions[begins]
        within = np.arange(len(rows)) - begins[rows]
        if (batch.positions != starts[rows] + within).any() or starts.min() < 0:
            raise ProtocolError(f"positions that are not consecutive within a row: {batch.positions.tolist()}")
        places, offsets = np.divmod(batch.positions, self._block_tokens)
        if places.max() >= batch.tables.shape[1]:
            raise ProtocolError(
                f"position {batch.positions.max()} lies past a table of {batch.tables.shape[1]} blocks of "
                f"{self._block_tokens} positions"
            )
        blocks = batch.tables[rows, places]
        if blocks.min() < 0 or blocks.max() >= len(self._filled):
            raise ProtocolError(f"blocks {blocks.min()} to {blocks.max()}, but there are {len(self._filled)}")
        return _Flat(blocks, offsets, rows, starts, begins)

    def _before(self, batch: RaggedBatch, flat: _Flat) -> Words:
        """The digest of each row's history before its first token, uint64 [n], once all of it was found."""
        held = -(-int(flat.starts.max()) // self._block_tokens)
        if not held:
            return np.zeros(len(flat.starts), dtype=np.uint64)
        tables = batch.tables[:, :held]
        if tables.min() < 0 or tables.max() >= len(self._filled):
            raise ProtocolError(f"tables with blocks {tables.min()} to {tables.max()}: there are {len(self._filled)}")
        needed = (flat.starts[:, None] - np.arange(held) * self._block_tokens).clip(0, self._block_tokens)
        ends = self._digests[tables, -1]
        expected = np.concatenate([np.zeros((len(tables), 1), np.uint64), ends[:, :-1]], 1)
        sound = (needed == 0) | ((self._filled[tables] >= needed) & (self._parents[tables] == expected))
        if not sound.all():
            raise ProtocolError(self._missing(batch, tables, needed, np.argwhere(~sound)[0]))
        last, offset = np.divmod(np.maximum(flat.starts - 1, 0), self._block_tokens)
        digests = self._digests[tables[np.arange(len(tables)), last], offset]
        return np.where(flat.starts > 0, digests, np.uint64(0))

    def _missing(self, batch: RaggedBatch, tables: Array, needed: Array, at: Array) -> str:
        row, place = at.tolist()
        block = int(tables[row, place])
        owner = f" of request {int(batch.owners[row])}" if len(batch.owners) else ""
        have, need = int(self._filled[block]), int(needed[row, place])
        found = "those of another history" if have >= need else f"only {have} positions"
        return (
            f"row {row}{owner} needs {need} positions in block {block}, at place {place} of its table, which holds "
            f"{found}"
        )

    def _store(self, flat: _Flat, digests: Words, before: Words) -> None:
        begins = np.flatnonzero((flat.offsets == 0) | (np.diff(flat.rows, prepend=-1) != 0))
        touched = flat.blocks[begins]
        if len(np.unique(touched)) != len(touched):
            raise ProtocolError(f"blocks {sorted(touched.tolist())} are written by two rows, or twice by one")
        same = (self._digests[flat.blocks, flat.offsets] == digests) & (flat.offsets < self._filled[flat.blocks])
        ends = flat.offsets[np.append(begins[1:], len(flat.blocks)) - 1] + 1
        kept = np.logical_and.reduceat(same, begins)
        self._filled[touched] = np.where(kept, self._filled[touched], ends)
        self._digests[flat.blocks, flat.offsets] = digests
        first = flat.offsets == 0
        self._parents[flat.blocks[first]] = before[first]
