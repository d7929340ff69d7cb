"""A model that is a table: logits depend on the last two tokens, which are read through the block table.

Its KV is a store of (token, position) per block slot. A forward reads a row's whole history through the row's block
ids and raises when a slot holds another position than it should, so wrong tables, positions or feeds cannot pass.
"""

from __future__ import annotations

import numpy as np
import torch

from specserve.models import Move, NoRowStates, RaggedBatch


class TableBackend:
    """A `Backend`. logits float32 [V, V, V]: table[second last token, last token] is a row of logits."""

    def __init__(self, logits: torch.Tensor, context_length: int = 4096) -> None:
        self.logits = logits
        self.forwards: list[RaggedBatch] = []
        self._context_length = context_length
        self._block_tokens = 0
        self._tokens = np.zeros((0, 0), dtype=np.int64)
        self._positions = np.zeros((0, 0), dtype=np.int64)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.logits.shape[-1]

    @property
    def context_length(self) -> int:
        """Positions that may be fed."""
        return self._context_length

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return self.logits.device

    @property
    def states(self) -> NoRowStates:
        """All of it is positional."""
        return NoRowStates()

    def bytes_per_block(self, block_tokens: int) -> int:
        """A token and a position, 8 bytes each."""
        return 16 * block_tokens

    def allocate(self, blocks: int, block_tokens: int) -> None:
        """Make the store; no slot holds a position yet."""
        self._block_tokens = block_tokens
        self._tokens = np.zeros((blocks, block_tokens), dtype=np.int64)
        self._positions = np.full((blocks, block_tokens), -1, dtype=np.int64)

    def copy_blocks(self, sources, copies) -> None:
        """Copy whole blocks."""
        for source, copy in zip(sources, copies, strict=True):
            self._tokens[copy], self._positions[copy] = self._tokens[source], self._positions[source]

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write, then look up the table for every wanted token. Raises RuntimeError for a history that is not there."""
        self.forwards.append(batch)
        self._write(batch)
        owners = np.repeat(np.arange(len(batch.tables)), np.diff(batch.offsets)).tolist()
        rows = [self._row(batch, owners[at], int(batch.positions[at])) for at in batch.wanted]
        return torch.stack(rows).clone() if rows else self.logits.new_empty(0, self.vocab_size)

    def move(self, moves: list[Move]) -> None:
        """Move positions of rows. Raises RuntimeError for one that does not belong where it goes."""
        found = []
        for move in moves:
            slots = [self._slot(move.table, source) for source in move.sources]
            found.append([(int(self._tokens[slot]), int(self._positions[slot])) for slot in slots])
        for move, held in zip(moves, found, strict=True):
            for place, (token, position) in enumerate(held):
                if position != move.first + place:
                    raise RuntimeError(f"a token of position {position} is moved to {move.first + place}")
                slot = self._slot(move.table, position)
                self._tokens[slot], self._positions[slot] = token, position

    def _write(self, batch: RaggedBatch) -> None:
        written, standing = set(), batch.standing()
        for row, table in enumerate(batch.tables):
            span = slice(batch.offsets[row], batch.offsets[row + 1])
            if span.start == span.stop:
                raise RuntimeError(f"row {row} of the batch is empty")
            columns = (batch.tokens[span], batch.positions[span], standing[span])
            for token, place, position in zip(*columns, strict=True):
                slot = self._slot(table, int(place))
                if slot in written or not 0 <= position < self._context_length:
                    raise RuntimeError(f"position {position} is written twice, or is beyond the context")
                if not 0 <= token < self.vocab_size:  # as an embedding does, where the table would count from its end
                    raise RuntimeError(f"token {token} is not in the vocabulary")
                written.add(slot)
                self._tokens[slot], self._positions[slot] = token, position
            self._row(batch, row, int(batch.positions[span.stop - 1]))

    def _slot(self, table: np.ndarray, position: int) -> tuple[int, int]:
        return int(table[position // self._block_tokens]), position % self._block_tokens

    def _row(self, batch: RaggedBatch, row: int, position: int) -> torch.Tensor:
        slots = [self._slot(batch.tables[row], p) for p in self._seen(batch, row, position)]
        held = [int(self._positions[slot]) for slot in slots]
        if held != list(range(len(slots))):
            raise RuntimeError(f"a history of positions {held}, expected 0 to {len(slots) - 1}")
        before = int(self._tokens[slots[-2]]) if len(slots) > 1 else 0
        return self.logits[before, int(self._tokens[slots[-1]])]

    def _seen(self, batch: RaggedBatch, row: int, position: int) -> list[int]:
        """The positions in the row's pages that stand before this one, and itself."""
        tree = batch.trees.get(row)
        if tree is None or position < tree.root:
            return list(range(position + 1))
        path, node = [], position - tree.root
        while node >= 0:
            path.append(tree.root + node)
            node = int(tree.parents[node])
        return [*range(tree.root), *reversed(path)]
