"""Recurrent state of many requests, and the moment of it that a row goes on from.

Recurrent state cannot be rewound by lowering a length. Megatron-LM keeps the state after every position of a
verification, depth + 1 copies per request, and copies the accepted one back. Here two moments are kept whatever the
depth: the state before a request's last stretch and the one after it. Where a start falls between the two, the
accepted tokens are read once more from the first moment; a whole kept chain costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specserve.errors import ConfigError, ProtocolError
from specserve.models import RaggedBatch
from specserve.models._stretches import Array, Stretch


def mamba_state_selective_copy(
    intermediate: torch.Tensor,
    current: torch.Tensor,
    rows: torch.Tensor,
    accepted: torch.Tensor,
    prefill: torch.Tensor,
) -> None:
    """Put the state after the last accepted token in force, in place (Megatron-LM's function of that name).

    intermediate [L, slots, S + 1, *state]: entry k is the state after the row's first token and k drafted ones;
    current [L, slots, *state]; rows int64 [n] the slot of each row, no slot twice; accepted int64 [n] in 0 … S; prefill
    bool [n] rows that keep what they have. Slots that are not named stay as they are.
    """
    decode = rows[~prefill]
    current[:, decode] = intermediate[:, decode, accepted[~prefill]]


@dataclass(frozen=True, slots=True)
class StateKind:
    """L layers whose state has the same shape. `name` is the attribute of transformers' cache layers that holds it.

    places are (layer, index among the layer's states); shape and dtype are those of one request in one layer.
    """

    name: str
    places: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one moment of one request."""
        return len(self.places) * int(np.prod(self.shape)) * self.dtype.itemsize


_NOTHING: Array = np.empty(0, np.int64)


@dataclass(slots=True)
class _Row:
    """The last stretch of a request: tokens from absolute position `start`, none when it was adopted; its place."""

    slot: int
    start: int
    tokens: Array

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class RecurrentStates:
    """`RowStates` for `rows` requests at once; the one that was not used for longest makes room for another.

    before[kind] [L, slots, *state] is the state at the start of each request's last stretch; after[kind]
    [L, slots, 1, *state] the one at its end, Megatron's S + 1 entries with the last one only.
    """

    def __init__(self, kinds: Sequence[StateKind], device: torch.device) -> None:
        self.kinds = tuple(kinds)
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []
        self._device = device
        self._free: list[int] = []
        self._rows: dict[int, _Row] = {}  # in order of use, the latest last

    def reserve(self, rows: int) -> None:
        """Make room. Raises ConfigError when the device has none."""
        try:
            self.before = [self._zeros(kind, rows) for kind in self.kinds]
            self.after = [self._zeros(kind, rows)[:, :, None] for kind in self.kinds]
        except RuntimeError as error:
            size = 2 * rows * sum(kind.bytes_per_row for kind in self.kinds) / 2**30
            raise ConfigError(f"no room for {size:.2f} GiB of recurrent state of {rows} requests: {error}") from None
        self._free = list(range(rows))
        self._rows = {}

    def _zeros(self, kind: StateKind, rows: int) -> torch.Tensor:
        return torch.zeros(len(kind.places), rows, *kind.shape, dtype=kind.dtype, device=self._device)

    def covered(self, owner: int, start: int) -> int:
        """`start` inside or at an end of the request's last stretch, or 0; else what was certain before it, or 0.

        A start beyond the stretch's end goes back to its beginning: what was drafted after that may have been refused.
        """
        row = self._rows.get(owner)
        if row is None or start < row.start:
            return 0
        return start if start <= row.end else row.start

    def forget(self, owner: int) -> None:
        """Give the request's place back."""
        row = self._rows.pop(owner, None)
        if row is not None:
            self._free.append(row.slot)

    def resume(self, batch: RaggedBatch) -> list[Stretch]:
        """Put each row's state at its start in force, in `before`, as far as a copy can.

        Returns the stretches of accepted tokens that must be read again to get there, and told by `advanced`. Raises
        ProtocolError for a row that cannot start where it says.
        """
        starts = batch.positions[batch.offsets[:-1]].tolist()
        again: list[Stretch] = []
        ended: list[_Row] = []
        for index, (owner, start) in enumerate(zip(batch.owners.tolist(), starts, strict=True)):
            if self.covered(owner, start) != start:
                raise ProtocolError(f"request {owner} cannot start at {start}; it has {self.covered(owner, start)}")
            if start == 0:
                self._begin(owner, set(batch.owners.tolist()))
                continue
            row = self._rows[owner] = self._rows.pop(owner)
            if row.start < start < row.end:
                again.append(Stretch(row.start, row.tokens[: start - row.start], batch.tables[index], 0, owner))
            elif row.start < start:
                ended.append(row)
        self._adopt(ended)
        return again

    def _begin(self, owner: int, company: set[int]) -> None:
        self.forget(owner)
        if not self._free:
            self.forget(next(known for known in self._rows if known not in company))
        slot = self._free.pop()
        for states in self.before:
            states[:, slot] = 0
        self._rows[owner] = _Row(slot, 0, _NOTHING)

    def _adopt(self, ended: Sequence[_Row]) -> None:
        """The last stretch of these rows was kept whole: the state at its end is where they go on."""
        if not ended:
            return
        slots = torch.tensor([row.slot for row in ended], device=self._device)
        nothing = torch.zeros_like(slots)
        for before, after in zip(self.before, self.after, strict=True):
            mamba_state_selective_copy(after, before, slots, nothing, nothing.bool())
        for row in ended:
            row.start, row.tokens = row.end, _NOTHING

    def slots(self, stretches: Sequence[Stretch]) -> torch.Tensor:
        """int64 [n]: where the states of these rows are."""
        return torch.tensor([self._rows[stretch.owner].slot for stretch in stretches], device=self._device)

    def advanced(self, stretches: Sequence[Stretch], states: Sequence[torch.Tensor]) -> None:
        """The rows start at the ends of these stretches now; states [L, n, *state] are those there."""
        slots = self.slots(stretches)
        for before, new in zip(self.before, states, strict=True):
            before[:, slots] = new
        for stretch in stretches:
            row = self._rows[stretch.owner]
            row.start, row.tokens = stretch.start + len(stretch.tokens), _NOTHING

    def read(self, stretches: Sequence[Stretch], states: Sequence[torch.Tensor]) -> None:
        """These are the rows' last stretches now; states [L, n, *state] are those at their ends."""
        slots = self.slots(stretches)
        for after, new in zip(self.after, states, strict=True):
            after[:, slots, 0] = new
        for stretch in stretches:
            self._rows[stretch.owner].tokens = np.asarray(stretch.tokens)
