"""The index tensors of a recorded step, made by the device from what it was handed: shapes never change.

What `RaggedPlan` works out on the host for each batch, padding included, this works out in the step itself: it may
neither look at a value nor at the host, so it may be recorded once and replayed on other values in the same place.

Padding never reaches a result. A row's tokens are its last ones, as kernels count queries from the end; a padded token
before them stands where a token of its row would, and writes to the null block, which belongs to nobody; a padded row
has no tokens and reads the null block only; a padded key repeats the row's last one, behind a mask. So nothing that a
row reads was written by another one, whatever it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specserve.models import RaggedBatch
from specserve.models._row_groups import PackedRows, RowGroup, running
from specserve.models._static_states import StaticStates
from specserve.models._static_trees import StaticTrees
from specserve.models._step_shapes import StepShape

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """A recorded step's batch, as views of one flat int64 buffer, on the device or on the host.

    tokens [rows, queries]; starts [rows], each row's first position; lengths [rows], 0 for a padded row; tables
    [rows, width]; wanted [rows · shown], indices into the flat padded tokens; trees and states where the shape has any.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    wanted: torch.Tensor
    trees: StaticTrees | None
    states: StaticStates | None

    @staticmethod
    def size(shape: StepShape, block_tokens: int) -> int:
        """Elements of the buffer."""
        return sum(_sizes(shape, block_tokens))

    @staticmethod
    def within(buffer: torch.Tensor, shape: StepShape, block_tokens: int) -> StaticInputs:
        """The views for this shape, from the beginning of a buffer that may be longer."""
        sizes = _sizes(shape, block_tokens)
        tokens, starts, lengths, tables, wanted, *others = torch.split(buffer[: sum(sizes)], sizes)
        return StaticInputs(
            tokens.view(shape.rows, -1),
            starts,
            lengths,
            tables.view(shape.rows, -1),
            wanted,
            StaticTrees.of(shape, *others[:3]),
            StaticStates.of(shape, *others[3:]),
        )

    def fill(self, batch: RaggedBatch, null_block: int) -> Ints:
        """Write a batch that fits, and padding where it has nothing; where each token went. On the host only."""
        tokens, starts, lengths, tables, wanted = (
            view.numpy() for view in (self.tokens, self.starts, self.lengths, self.tables, self.wanted)
        )
        rows, queries = len(batch.offsets) - 1, tokens.shape[1]
        owners = np.repeat(np.arange(rows), np.diff(batch.offsets))
        # Where each token goes: a row ends at its last place.
        flat: Ints = (owners + 1) * queries + np.arange(len(batch.tokens)) - batch.offsets[owners + 1]
        tokens.fill(0)
        tokens.reshape(-1)[flat] = batch.tokens
        starts[:rows], starts[rows:] = batch.positions[batch.offsets[:-1]], 0
        lengths[:rows], lengths[rows:] = np.diff(batch.offsets), 0
        width = min(tables.shape[1], batch.tables.shape[1])
        tables.fill(null_block)
        tables[:rows, :width] = batch.tables[:, :width]
        wanted.fill(0)
        wanted[: len(batch.wanted)] = flat[batch.wanted]
        if self.trees is not None:
            self.trees.fill(batch, flat)
        return flat


def _sizes(shape: StepShape, block_tokens: int) -> list[int]:
    table = shape.rows * shape.width(block_tokens)
    return [
        shape.positions,
        shape.rows,
        shape.rows,
        table,
        shape.logits,
        *StaticTrees.sizes(shape),
        *StaticStates.sizes(shape),
    ]


class StaticPlan:
    """An `AttentionPlan` for inputs on the device. positions int64 [T]: where the flat padded tokens stand.

    null_slot is where padded tokens write. dtype is that of masks.
    """

    def __init__(
        self, shape: StepShape, inputs: StaticInputs, block_tokens: int, null_slot: int, dtype: torch.dtype
    ) -> None:
        self._shape = shape
        self._tables = inputs.tables
        self._trees, self._states = inputs.trees, inputs.states
        self._block_tokens = block_tokens
        self._dtype = dtype
        self._device = inputs.tokens.device
        self._groups: dict[tuple[int | None, int], list[RowGroup]] = {}
        self._packed: PackedRows | None = None
        behind = torch.arange(-shape.queries, 0, device=self._device)  # how far before its row's end each query is
        ends = inputs.starts + inputs.lengths
        self._ends = ends
        self._queries = (ends[:, None] + behind).clamp(min=0)
        self._keys = torch.arange(shape.keys, device=self._device)
        read = torch.minimum(self._keys, (ends - 1).clamp(min=0)[:, None])
        if self._states is not None:
            read = torch.maximum(read, self._states.origins[:, None])  # what is before one was never written
        self._read = self._slots_of(read).view(-1)
        padded = -behind > inputs.lengths[:, None]
        self.new_slots = self._slots_of(self._queries).masked_fill_(padded, null_slot).view(-1)
        self._standing = self._queries if self._trees is None else self._trees.standing(self._queries)
        self.positions = self._standing.view(-1)

    def groups(self, window: int | None, fold: int) -> list[RowGroup]:
        """See `AttentionPlan`: all rows share one call."""
        known = self._groups.get((window, fold))
        if known is None:
            shape = self._shape
            mask = self._mask(window, fold)
            known = [RowGroup(shape.rows, shape.queries, shape.keys, None, None, self.new_slots, self._read, mask)]
            self._groups[window, fold] = known
        return known

    def packed(self) -> PackedRows | None:
        """See `AttentionPlan`. A padded row has no keys."""
        if self._trees is not None or self._states is not None:
            return None
        if self._packed is None:
            shape = self._shape
            begins = torch.arange(0, shape.positions + 1, shape.queries, dtype=torch.int32, device=self._device)
            used = self._ends.int()
            self._packed = PackedRows(begins, used, running(used), self._tables.int(), shape.queries, shape.keys)
        return self._packed

    def _mask(self, window: int | None, fold: int) -> torch.Tensor:
        hidden = self._keys > self._queries[:, :, None]
        if self._trees is not None:
            hidden = hidden | self._trees.off_path(self._keys)
        if self._states is not None:
            hidden = hidden | self._states.hidden(self._keys)
        if window is not None:
            hidden = hidden | (self._keys_standing() <= self._standing[:, :, None] - window)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))
        return mask.repeat(1, fold, 1)[:, None]

    def _keys_standing(self) -> torch.Tensor:
        """int64 [L] or [rows, 1, L]: where keys stand."""
        if self._trees is None:
            return self._keys
        return self._trees.standing(self._keys.expand(self._shape.rows, -1))[:, None]

    def _slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 like positions [rows, m]: where each is kept."""
        blocks = self._tables.gather(1, positions // self._block_tokens)
        return blocks * self._block_tokens + positions % self._block_tokens
