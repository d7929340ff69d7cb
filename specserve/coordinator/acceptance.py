"""How often drafted tokens are kept, by place in a chain or tree: of each request, and of those like it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.coordinator.depth import Checked
from specserve.coordinator.requests import RequestState
from specserve.coordinator.round_costs import FloatArray
from specserve.types import RowId

_FIRST = (0.6, 4.0)
"""Before anything was seen: the share kept at the first position, and how many observations that counts for."""

_FADE, _CLASS_FADE = 0.99, 0.997
"""Weight of what was seen of a request, one round later, and of what was seen of requests like it."""

_LONGEST_FADE = 20
"""Rounds without an observation that the next one fades for, at most: it then counts for about a fifth of all."""

_FROM_BEFORE = 2.0
"""Observations that a position's estimate borrows from the position before it."""

_HARDLY = 1e-6
"""Observations that the first one borrows, so that nothing is divided by 0 when all that was seen has faded."""

_FROM_CLASS = 16.0
"""Observations that a request's estimate borrows from requests like it."""

_WARM = 0.6
"""The temperature from which on requests are not like those at lower ones."""

RequestClass = tuple[str | None, int]
"""Whose drafts it gets, and how it decodes: 0 greedily, 1 at a low and 2 at a high temperature."""


def class_of(state: RequestState) -> RequestClass:
    """Which requests it is like, as far as can be told before it has any drafts."""
    temperature = state.request.sampling.temperature
    return state.request.source, (temperature > 0) + (temperature >= _WARM)


class Acceptance:
    """Shares of drafts kept at position j when those before were kept; what was seen long ago fades.

    A tree's position has several tokens side by side, of which one at most is kept: rank 0 is the first of them, and a
    chain's only one. Each position leans on the one before it, each rank of the first one on those before it, and each
    request on those of its class, so that what was tried rarely, or not for long, is judged by what it most resembles.
    Nothing here looks at a draft's own token or probability.
    """

    def __init__(self, depth: int, width: int = 1) -> None:
        self._table = (depth, width)
        self._places = np.arange(depth)
        self._classes: dict[RequestClass, FloatArray] = {}  # [2, depth, width]: tried, and kept
        self._shares: dict[RequestClass, FloatArray] = {}  # of `_classes`, as long as it is
        self._index: dict[RowId, int] = {}
        self._class_of: dict[RowId, RequestClass] = {}
        self._row_kept = np.zeros((0, depth, width))
        self._row_tried = np.zeros((0, depth, width))

    def meet(self, states: Sequence[RequestState]) -> bool:
        """Forget the requests that are none of these, and say whether one of them is new."""
        rows = [state.row for state in states]
        if len(rows) == len(self._index) and all(row in self._index for row in rows):
            return False
        known = [row for row in rows if row in self._index]
        at = [self._index[row] for row in known]
        more = np.zeros((len(rows) - len(known), *self._table))
        self._row_kept = np.concatenate([self._row_kept[at], more])
        self._row_tried = np.concatenate([self._row_tried[at], more])
        new = [state for state in states if state.row not in self._index]
        self._class_of = {row: self._class_of[row] for row in known} | {state.row: class_of(state) for state in new}
        self._index = {row: index for index, row in enumerate(self._class_of)}
        return bool(new)

    def class_of(self, row: RowId) -> RequestClass:
        """That of a request which was met."""
        return self._class_of[row]

    def observe(self, checked: Sequence[Checked], elapsed: int) -> None:
        """These requests offered drafts, none of them empty; `elapsed` rounds since the last.

        A request is named once at most; what was not met, or was forgotten meanwhile, teaches nothing.
        """
        checked = [each for each in checked if each.row in self._index]
        if not checked:
            return
        at = [self._index[each.row] for each in checked]
        weight = _FADE ** min(max(1, elapsed), _LONGEST_FADE)
        self._row_kept *= weight
        self._row_tried *= weight
        tried, good = np.zeros((2, len(checked), *self._table))
        _, offered, kept = (np.array(column)[:, None] for column in list(zip(*checked, strict=True))[:3])
        tried[:, :, 0] = self._places < np.minimum(offered, kept + 1)
        good[:, :, 0] = self._places < kept
        for index, each in enumerate(checked):
            if each.met is not None:
                tried[index], good[index] = self._met(each.met)
        self._row_tried[at] += tried
        self._row_kept[at] += good
        seen: dict[RequestClass, list[int]] = {}
        for index, each in enumerate(checked):
            seen.setdefault(self._class_of[each.row], []).append(index)
        for kind, indices in seen.items():
            known = self._class(kind)
            known *= _CLASS_FADE
            known[0] += tried[indices].sum(0)
            known[1] += good[indices].sum(0)
            self._shares.pop(kind, None)

    def _class(self, kind: RequestClass) -> FloatArray:
        if kind not in self._classes:
            known = self._classes[kind] = np.zeros((2, *self._table))
            known[:, :1, :1] = [[[_FIRST[1]]], [[_FIRST[0] * _FIRST[1]]]]
        return self._classes[kind]

    def _met(self, families: Sequence[tuple[int, int]]) -> FloatArray:
        """float64 [2, depth, width]: what was tried, and what was kept, of these families."""
        tried, good = found = np.zeros((2, *self._table))
        for level, (siblings, rank) in enumerate(families):
            tried[level, :siblings] = 1
            if rank >= 0:
                good[level, rank] = 1
        return found

    def of_class(self, kind: RequestClass) -> FloatArray:
        """float64 [depth, width]: the shares over all requests of a class."""
        if kind not in self._shares:
            shares: list[list[float]] = []
            for tried, kept in zip(*self._class(kind).tolist(), strict=True):
                shares.append(_leaning(kept, tried, shares[-1] if shares else None))
            self._shares[kind] = np.array(shares)
        return self._shares[kind]

    def shares(self, rows: Sequence[RowId], hopes: float = 0.0) -> FloatArray:
        """float64 [rows, depth, width]: how often the draft of that rank is kept, when what is before it was.

        hopes: so many spreads more than what is expected. The rows were met.
        """
        at = [self._index[row] for row in rows]
        alike = np.array([self.of_class(self._class_of[row]) for row in rows])
        seen = self._row_tried[at] + _FROM_CLASS
        shares: FloatArray = (self._row_kept[at] + _FROM_CLASS * alike) / seen
        if hopes:
            shares = np.minimum(1.0, shares + hopes * np.sqrt(shares * (1 - shares) / seen))
        return shares


def _leaning(kept: Sequence[float], tried: Sequence[float], before: Sequence[float] | None) -> list[float]:
    """The shares of one position's ranks, which lean on those of the position before.

    At the first position a rank leans on the first one's share, of what those before it leave.
    """
    shares: list[float] = []
    for rank, (good, seen) in enumerate(zip(kept, tried, strict=True)):
        lent, like = (_HARDLY, 0.0) if before is None else (_FROM_BEFORE, before[rank])
        if rank and before is None:
            lent, like = _FROM_BEFORE, max(0.0, 1 - sum(shares)) * shares[0]
        shares.append((good + lent * like) / (seen + lent))
    return shares
