"""Attention whose result at a position depends on that position and its own row only, to the last bit.

Sums of floats change with their order, and kernels choose it by the shapes of a call, down to the place that a query
has among the threads. The ordinary step pads rows that share a call to common shapes, so company decides. Here every
position has a call of its own, one query over the keys that it may see and nothing else: the shapes are a function of
the position. Keys are copied from the pages first, so that their place in memory is no part of the shape either.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from specserve.models import RaggedBatch
from specserve.models._pages import Pages, Scoring, attend


class InvariantStep:
    """A `KeyValueStore` for one forward on a CPU; see the module."""

    def __init__(self, pages: Pages, batch: RaggedBatch) -> None:
        self._pages = pages
        self._starts = batch.positions[batch.offsets[:-1]].tolist()
        self._spans = list(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True))
        self._slots = [
            torch.from_numpy(_slots(table, start + end - begin, pages.block_tokens))
            for table, start, (begin, end) in zip(batch.tables, self._starts, self._spans, strict=True)
        ]
        self._trees = batch.trees
        self._new_slots = torch.cat([slots[start:] for slots, start in zip(self._slots, self._starts, strict=True)])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `KeyValueStore.attend`."""
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        keys.index_copy_(0, self._new_slots, key)
        values.index_copy_(0, self._new_slots, value)
        queries = torch.unflatten(query, 1, (key.shape[1], -1))
        scoring = Scoring(scaling, softcap)
        attended = [
            attend(queries[token : token + 1].clone(), mine, theirs, None, scoring)
            for token, mine, theirs in self._views(keys, values, window)
        ]
        return torch.cat(attended).flatten(1, 2)

    def _views(
        self, keys: torch.Tensor, values: torch.Tensor, window: int | None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each flat token with the keys and values that it sees, [1, kv_heads, L, dim]."""
        rows = zip(self._slots, self._starts, self._spans, strict=True)
        for row, (slots, start, (begin, end)) in enumerate(rows):
            mine, theirs = (pages.index_select(0, slots).transpose(0, 1)[None] for pages in (keys, values))
            for token in range(begin, end):
                seen = self._seen(row, start + token - begin, window)
                yield token, mine[:, :, seen], theirs[:, :, seen]

    def _seen(self, row: int, position: int, window: int | None) -> slice | list[int]:
        """The positions that a token sees: a node of a tree its own path, in the order of a chain."""
        tree = self._trees.get(row)
        if tree is None or position < tree.root:
            return slice(0 if window is None else max(0, position - window + 1), position + 1)
        path = (tree.root + np.flatnonzero(tree.paths()[position - tree.root])).tolist()
        seen = [*range(tree.root), *path]
        return seen if window is None else seen[-window:]


def _slots(table: np.ndarray, count: int, block_tokens: int) -> np.ndarray:
    """int64 [count]: where the first positions of a row with this block table are."""
    block, within = np.divmod(np.arange(count), block_tokens)
    return table[block].astype(np.int64) * block_tokens + within
