"""KV pages that hold digests of histories instead of keys and values, and refuse to read what is not there.

The slot of a position holds a 64-bit digest of all tokens up to it. A block also knows how many of its slots are
written, and the digest of what came before it. So a row's whole history is checked block by block, and a table, a
position or a feed that is wrong anywhere makes an error instead of a text. The nodes of a tree are digested along their
own paths; once a path is moved into order, it is checked like any other history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specserve.errors import ProtocolError
from specserve.models import Move, RaggedBatch, TokenTree
from specserve.models._hash_language import Words, mix

Array = npt.NDArray[Any]

_TOKEN_SPREAD = np.uint64(0xD1342543DE82EF95)  # odd: tokens and positions of any size stay apart


@dataclass(frozen=True, slots=True)
class _Flat:
    """A batch by token [T]: block, offset in it, slot and row; by row [n]: start and first token."""

    blocks: Array
    offsets: Array
    slots: Array
    rows: Array
    starts: Array
    begins: Array


class DigestPages:
    """`blocks` blocks of `block_tokens` positions. Memory is 8 bytes per position and 16 per block.

    A step has few tokens, so that it costs what its calls of numpy cost: there are no more of them than it takes.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks = blocks
        self._digests = np.zeros(blocks * block_tokens, dtype=np.uint64)  # by slot: block · block_tokens + offset
        self._ends = self._digests[block_tokens - 1 :: block_tokens]
        self._parents = np.zeros(blocks, dtype=np.uint64)
        self._filled = np.zeros(blocks, dtype=np.int64)
        self._begins = np.arange(0, dtype=np.int64)  # of blocks, in positions
        self._positions = mix(np.arange(0, dtype=np.uint64))

    def write(self, batch: RaggedBatch) -> Words:
        """Write a batch; returns the digests uint64 [T] of the histories that end with its tokens.

        What another history left in a slot is void, and so is what lay past it in its block; a slot that is written
        again with what it holds leaves the rest of its block as it is. Raises ProtocolError, with nothing written, for
        a row that is empty, jumps, starts after positions that its blocks do not hold, or shares a block that it
        writes with another row of the batch.
        """
        if batch.trees:
            return self._write_with_trees(batch)
        flat = self._flat(batch)
        before = self._before(batch, flat)
        spread = mix(batch.tokens.view(np.uint64) * _TOKEN_SPREAD ^ self._positions[batch.positions])
        total = spread.cumsum()
        past = total - spread
        digests: Words = total + (before - past[flat.begins])[flat.rows]
        self._store(flat, digests, spread)
        return digests

    def _write_with_trees(self, batch: RaggedBatch) -> Words:
        """Rows with trees one by one: first what comes before the nodes as a row of its own, then the nodes."""
        digests = np.zeros(len(batch.tokens), dtype=np.uint64)
        for row, (begin, end) in enumerate(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)):
            tree = batch.trees.get(row)
            start = int(batch.positions[begin])
            nodes = end if tree is None else min(end, begin + max(0, tree.root - start))
            table = batch.tables[row : row + 1]
            if nodes > begin:
                digests[begin:nodes] = self.write(_row(batch, begin, nodes, table))
            if tree is not None and nodes < end:
                tokens, first = batch.tokens[nodes:end], int(batch.positions[nodes])
                digests[nodes:end] = self._write_nodes(tokens, first - tree.root, tree, table[0])
        return digests

    def _write_nodes(self, tokens: Array, first: int, tree: TokenTree, table: Array) -> Words:
        """The nodes from number `first` on; returns their digests. Raises ProtocolError for missing ancestors."""
        levels, before = tree.levels(), self._end(table, tree.root)
        digests = [*self._at(table, range(tree.root, tree.root + first)).tolist()]
        for number, token in enumerate(tokens.tolist(), first):
            parent = int(tree.parents[number])
            above = np.uint64(digests[parent]) if parent >= 0 else before
            position = np.array([tree.root + levels[number]])
            digest = (above + _spread(np.array([token]), position))[0]
            self._put(table, tree.root + number, digest, above)
            digests.append(int(digest))
        return np.array(digests[first:], dtype=np.uint64)

    def _end(self, table: Array, length: int) -> np.uint64:
        """The digest of a row's first positions, all of which its blocks hold. Raises ProtocolError otherwise."""
        tokens = np.zeros(1, dtype=np.int64)
        row = RaggedBatch(tokens, np.array([length]), np.array([0, 1]), table[None], tokens)
        starts = np.array([length])
        found: np.uint64 = self._before(row, _Flat(tokens, tokens, tokens, tokens, starts, tokens))[0]
        return found

    def _at(self, table: Array, positions: Sequence[int]) -> Words:
        blocks, offsets = np.divmod(np.array(positions, dtype=np.int64), self._block_tokens)
        if (self._filled[table[blocks]] <= offsets).any():
            raise ProtocolError(f"a tree goes on from nodes that were never written, at {list(positions)}")
        digests: Words = self._digests[table[blocks] * np.int64(self._block_tokens) + offsets]
        return digests

    def _put(self, table: Array, position: int, digest: np.uint64, before: np.uint64) -> None:
        """Write one position; what lies past it in its block is void."""
        place, offset = divmod(position, self._block_tokens)
        block = int(table[place])
        self._digests[block * self._block_tokens + offset] = digest
        self._filled[block] = offset + 1
        if offset == 0:
            self._parents[block] = before

    def move(self, moves: Sequence[Move]) -> None:
        """See `HoldsTrees`: a kept path becomes the row's history. Raises ProtocolError for nodes never written."""
        found = [self._at(move.table, move.sources) for move in moves]
        for move, digests in zip(moves, found, strict=True):
            before = self._end(move.table, move.first)
            for place, digest in enumerate(digests):
                self._put(move.table, move.first + place, digest, before)
                before = digest

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """Make the blocks `copies` hold what the blocks `sources` hold."""
        pages = self._digests.reshape(self._blocks, self._block_tokens)
        here, there = np.array(sources, dtype=np.int64), np.array(copies, dtype=np.int64)
        for store in (pages, self._parents, self._filled):
            store[there] = store[here]

    def _flat(self, batch: RaggedBatch) -> _Flat:
        begins = batch.offsets[:-1]
        lengths = batch.offsets[1:] - begins
        if not len(lengths) or lengths.min() < 1:
            raise ProtocolError(f"a batch of rows with {lengths.tolist()} tokens; each needs at least one")
        count = len(lengths)
        rows = np.arange(count).repeat(lengths)
        shifts = batch.positions - np.arange(len(rows))  # the same in all of a row
        firsts = shifts[begins]
        starts = firsts + begins
        if (shifts != firsts[rows]).any() or starts.min() < 0:
            raise ProtocolError(f"positions that are not consecutive within a row: {batch.positions.tolist()}")
        places, offsets = np.divmod(batch.positions, self._block_tokens)
        self._reach(batch, int(places.max()))
        blocks = batch.tables[rows, places]
        self._check("blocks", blocks)
        return _Flat(blocks, offsets, blocks * np.int64(self._block_tokens) + offsets, rows, starts, begins)

    def _reach(self, batch: RaggedBatch, place: int) -> None:
        """See that the tables reach up to a block of this number, and that its positions' words are there."""
        if place >= batch.tables.shape[1]:
            raise ProtocolError(
                f"position {batch.positions.max()} lies past a table of {batch.tables.shape[1]} blocks of "
                f"{self._block_tokens} positions"
            )
        if place >= len(self._begins):
            self._begins = np.arange(2 * place + 2) * self._block_tokens
            self._positions = mix(np.arange(len(self._begins) * self._block_tokens, dtype=np.uint64))

    def _check(self, what: str, blocks: Array) -> None:
        lowest, highest = blocks.min(), blocks.max()
        if lowest < 0 or highest >= self._blocks:
            raise ProtocolError(f"{what} {lowest} to {highest}, but there are {self._blocks}")

    def _before(self, batch: RaggedBatch, flat: _Flat) -> Words:
        """The digest of each row's history before its first token, uint64 [n], once all of it was found."""
        held = -(-int(flat.starts.max()) // self._block_tokens)
        if not held:
            return np.zeros(len(flat.starts), dtype=np.uint64)
        tables = batch.tables[:, :held]
        self._check("tables with blocks", tables)
        needed = np.minimum(flat.starts[:, None] - self._begins[:held], self._block_tokens)
        parents = self._parents[tables]
        parents[:, 1:] ^= self._ends[tables[:, :-1]]  # 0 where each block goes on from the one before
        sound = (self._filled[tables] >= needed) & (parents == 0) | (needed <= 0)
        if not sound.all():
            raise ProtocolError(self._missing(batch, tables, needed, np.argwhere(~sound)[0]))
        newest = flat.starts - 1
        last, offset = np.divmod(newest, self._block_tokens)  # −1 of a row that starts at 0: the end of some block
        digests: Words = self._digests[tables[np.arange(len(tables)), last] * np.int64(self._block_tokens) + offset]
        digests[newest < 0] = 0
        return digests

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

    def _store(self, flat: _Flat, digests: Words, spread: Words) -> None:
        fresh = flat.offsets == 0
        heads = fresh.copy()
        heads[flat.begins] = True
        begins = heads.nonzero()[0]
        touched = flat.blocks[begins]
        written = touched.tolist()
        if len(set(written)) != len(written):
            raise ProtocolError(f"blocks {sorted(written)} are written by two rows, or twice by one")
        filled = self._filled[touched]
        counts = flat.offsets + 1
        same = (self._digests[flat.slots] == digests) & (counts <= self._filled[flat.blocks])
        ends = np.maximum.reduceat(counts, begins)
        self._filled[touched] = np.where(np.logical_and.reduceat(same, begins), filled, ends)
        self._digests[flat.slots] = digests
        if fresh.any():
            self._parents[flat.blocks[fresh]] = (digests - spread)[fresh]


def _spread(tokens: Array, positions: Array) -> Words:
    """What each token adds to its history's digest."""
    return mix(tokens.astype(np.uint64) * _TOKEN_SPREAD ^ mix(positions.astype(np.uint64)))


def _row(batch: RaggedBatch, begin: int, end: int, table: Array) -> RaggedBatch:
    """A part of one row as a batch of its own."""
    nothing = np.empty(0, dtype=np.int64)
    return RaggedBatch(batch.tokens[begin:end], batch.positions[begin:end], np.array([0, end - begin]), table, nothing)
