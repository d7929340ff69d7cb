"""From a ragged batch to index and mask tensors, once per forward and attention window, not once per layer.

Rows with few queries (decoding, verification) share one padded attention call per class of context length; a row
with many queries (prefill) has its own. Padding never reaches a result: a padded query repeats the row's last one,
a padded key repeats the row's last slot (which holds finite values) behind a mask.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from specserve.models import RaggedBatch, TokenTree

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_SHORT_QUERIES = 32
_SHORTEST_CLASS = 64


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that share one attention call: R rows, padded to Q queries and L keys.

    gather int64 [R·Q] flat tokens of the padded queries, None when these are all tokens in order; keep int64 [g]
    indices into the padded result that are real, None for all; tokens int64 [g] the flat tokens they belong to;
    slots [R·L] where keys are, a slice when consecutive; mask [R, 1, 1 or
    fold·Q, L] to be added to the scores, None when every query sees every key.
    """

    rows: int
    queries: int
    keys: int
    gather: torch.Tensor | None
    keep: torch.Tensor | None
    tokens: torch.Tensor
    slots: torch.Tensor | slice
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows as kernels for paged attention want them: queries one behind the other, each row's the last of its keys.

    int32: begins [n + 1] of each row's queries, and where they end; used [n] keys of each; key_begins [n + 1] their
    running sums; tables [n, width]. queries and keys are bounds of what one row has.
    """

    begins: torch.Tensor
    used: torch.Tensor
    key_begins: torch.Tensor
    tables: torch.Tensor
    queries: int
    keys: int


def running(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: the sums of none, one, … of counts int32 [n]."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


class AttentionPlan(Protocol):
    """What a forward's attention has to know. `new_slots` int64 [T]: where the batch's own keys and values go."""

    @property
    def new_slots(self) -> torch.Tensor:
        """See the class."""
        ...

    def groups(self, window: int | None, fold: int) -> list[RowGroup]:
        """The attention calls for layers with this window (positions) and `fold` query heads per key head."""
        ...

    def packed(self) -> PackedRows | None:
        """The rows for a kernel; None where some do not see all keys before them, as kernels take for granted."""
        ...


class RaggedPlan:
    """The index tensors of one forward. `new_slots` int64 [T]: where the batch's own keys and values go.

    origins int64 [n]: the first position of each row that may be read, 0 where there are none.
    """

    def __init__(
        self,
        batch: RaggedBatch,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        origins: Ints | None = None,
    ) -> None:
        self._batch = batch
        self._block_tokens = block_tokens
        self._dtype = dtype
        self._device = device
        self._lengths = np.diff(batch.offsets)
        self._standing = batch.standing()
        self._starts = batch.positions[batch.offsets[:-1]]
        self._ends = self._starts + self._lengths
        self._origins = np.zeros_like(self._starts) if origins is None else origins
        self._classes = self._rows_by_class()
        self._groups: dict[tuple[int | None, int], list[RowGroup]] = {}
        self._packed: PackedRows | None = None
        rows = np.repeat(np.arange(len(self._lengths)), self._lengths)
        self.new_slots = self._to_device(self._slots_of(rows, batch.positions))

    def groups(self, window: int | None, fold: int) -> list[RowGroup]:
        """The attention calls for layers with this window (positions) and `fold` query heads per key head."""
        known = self._groups.get((window, fold))
        if known is None:
            known = [self._group(rows, window, fold) for rows in self._classes]
            self._groups[window, fold] = known
        return known

    def packed(self) -> PackedRows | None:
        """See `AttentionPlan`."""
        if self._batch.trees or self._origins.any():
            return None
        if self._packed is None:
            begins, used, tables = (
                self._to_device(each.astype(np.int32)) for each in (self._batch.offsets, self._ends, self._batch.tables)
            )
            longest, furthest = int(self._lengths.max()), int(self._ends.max())
            self._packed = PackedRows(begins, used, running(used), tables, longest, furthest)
        return self._packed

    def _rows_by_class(self) -> list[Ints]:
        if len(self._lengths) == 1:
            return [np.zeros(1, dtype=np.int64)]
        classes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, (length, end) in enumerate(zip(self._lengths.tolist(), self._ends.tolist(), strict=True)):
            # Within a class contexts differ by less than a factor of two, which bounds the padding.
            short = (0, max(end, _SHORTEST_CLASS).bit_length())
            classes[short if length <= _SHORT_QUERIES else (1, row)].append(row)
        return [np.array(rows, dtype=np.int64) for rows in classes.values()]

    def _group(self, rows: Ints, window: int | None, fold: int) -> RowGroup:
        starts, ends, lengths = self._starts[rows], self._ends[rows], self._lengths[rows]
        first_keys = self._origins[rows]
        if window is not None:
            first_keys = np.maximum(self._standing[self._batch.offsets[rows]] - window + 1, first_keys)
        queries, keys = int(lengths.max()), int((ends - first_keys).max())
        key_positions = first_keys[:, None] + np.arange(keys)
        query_positions = np.minimum(starts[:, None] + np.arange(queries), ends[:, None] - 1)
        slots = self._slots_of(rows[:, None], np.minimum(key_positions, ends[:, None] - 1)).reshape(-1)
        gather, keep, tokens = self._token_indices(rows, queries, query_positions - starts[:, None])
        return RowGroup(
            rows=len(rows),
            queries=queries,
            keys=keys,
            gather=gather,
            keep=keep,
            tokens=tokens,
            slots=self._slice_or_tensor(slots),
            mask=self._mask(self._hidden(rows, query_positions, key_positions, window), fold),
        )

    def _token_indices(
        self, rows: Ints, queries: int, within: Ints
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        flat = (self._batch.offsets[rows][:, None] + within).reshape(-1)
        real = np.flatnonzero(np.arange(queries) < self._lengths[rows][:, None])
        in_order = len(self._classes) == 1 and len(flat) == len(self._batch.tokens)
        return (
            None if in_order else self._to_device(flat),
            None if len(real) == len(flat) else self._to_device(real),
            self._to_device(flat[real]),
        )

    def _hidden(self, rows: Ints, query_positions: Ints, key_positions: Ints, window: int | None) -> Bools:
        """bool [R, Q, L]: what a query does not see."""
        queries, keys = query_positions[:, :, None], key_positions[:, None, :]
        hidden: Bools = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        for index, row in enumerate(rows.tolist()):
            if row in self._batch.trees:
                tree = self._batch.trees[row]
                hidden[index] = _hidden_in_tree(tree, query_positions[index], key_positions[index], window)
        return hidden

    def _mask(self, hidden: Bools, fold: int) -> torch.Tensor | None:
        if not hidden.any():
            return None
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(torch.from_numpy(hidden).to(self._device, non_blocking=True), float("-inf"))
        if mask.shape[1] > 1:
            mask = mask.repeat(1, fold, 1)
        return mask[:, None]

    def before(self) -> torch.Tensor:
        """int64 [T]: where what belongs to the position before each token's is kept; each has one."""
        rows = np.repeat(np.arange(len(self._lengths)), self._lengths)
        return self._to_device(self._slots_of(rows, self._batch.positions - 1))

    def _slots_of(self, rows: Ints, positions: Ints) -> Ints:
        block, within = np.divmod(positions, self._block_tokens)
        return self._batch.tables[rows, block].astype(np.int64) * self._block_tokens + within

    def _slice_or_tensor(self, slots: Ints) -> torch.Tensor | slice:
        first, count = int(slots[0]), len(slots)
        if bool((np.diff(slots) == 1).all()):
            return slice(first, first + count)
        return self._to_device(slots)

    def _to_device(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _hidden_in_tree(tree: TokenTree, queries: Ints, keys: Ints, window: int | None) -> Bools:
    """bool [Q, L]: what queries of a row with this tree do not see, by positions in its pages."""
    last = len(tree.parents) - 1
    query_nodes, key_nodes = queries - tree.root, keys - tree.root
    off_path = ~tree.paths()[query_nodes.clip(0, last)[:, None], key_nodes.clip(0, last)]
    hidden: Bools = (keys > queries[:, None]) | (off_path & (query_nodes >= 0)[:, None] & (key_nodes >= 0))
    if window is not None:
        levels = tree.levels()
        standing = [
            np.where(nodes >= 0, tree.root + levels[nodes.clip(0, last)], places)
            for nodes, places in ((query_nodes, queries), (key_nodes, keys))
        ]
        hidden |= standing[1] <= standing[0][:, None] - window
    return hidden
