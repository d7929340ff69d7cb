"""How often drafted tokens are kept, by chain position: of each request, and of all together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.coordinator.costs import FloatArray
from specserve.types import RowId

_FIRST = (0.6, 4.0)
"""Before anything was seen: the share kept at the first position, and how many observations that counts for."""

_FADE = 0.99
"""Weight of what was seen, one round later."""

_LONGEST_FADE = 20
"""Rounds without an observation that the next one fades for, at most: it then counts for about a fifth of all."""

_FROM_BEFORE = 2.0
"""Observations that a position's estimate borrows from the position before it."""

_FROM_ALL = 8.0
"""Observations that a request's estimate borrows from all requests."""


class Acceptance:
    """Shares of drafts kept at position j when those before were kept; what was seen long ago fades.

    Each position leans on the one before it and each request on all of them, so that what was tried rarely, or not for
    long, is judged by what it most resembles. Nothing here looks at a draft's own token or probability.
    """

    def __init__(self, depth: int) -> None:
        self._kept = np.zeros(depth)
        self._tried = np.zeros(depth)
        self._kept[:1], self._tried[:1] = _FIRST[0] * _FIRST[1], _FIRST[1]
        self._places = np.arange(depth)
        self._index: dict[RowId, int] = {}
        self._row_kept = np.zeros((0, depth))
        self._row_tried = np.zeros((0, depth))

    def keep_only(self, rows: Sequence[RowId]) -> None:
        """Forget the requests that are none of these."""
        known = [row for row in rows if row in self._index]
        at = [self._index[row] for row in known]
        self._row_kept, self._row_tried = self._row_kept[at], self._row_tried[at]
        self._index = {row: index for index, row in enumerate(known)}

    def observe(self, rows: Sequence[RowId], offered: Sequence[int], kept: Sequence[int], elapsed: int) -> None:
        """These requests offered chains of these lengths, of which so many were kept; `elapsed` rounds since the last.

        A request is named once at most.
        """
        at = self._indices(rows)
        self._fade(_FADE ** min(max(1, elapsed), _LONGEST_FADE))
        offers, keeps = np.array(offered)[:, None], np.array(kept)[:, None]
        tried = self._places < np.minimum(offers, keeps + 1)
        good = self._places < keeps
        self._tried += tried.sum(0)
        self._kept += good.sum(0)
        self._row_tried[at] += tried
        self._row_kept[at] += good

    def _indices(self, rows: Sequence[RowId]) -> list[int]:
        for row in rows:
            self._index.setdefault(row, len(self._index))
        lacking = len(self._index) - len(self._row_kept)
        if lacking > 0:
            more = np.zeros((lacking, len(self._places)))
            self._row_kept = np.concatenate([self._row_kept, more])
            self._row_tried = np.concatenate([self._row_tried, more])
        return [self._index[row] for row in rows]

    def _fade(self, weight: float) -> None:
        self._kept *= weight
        self._tried *= weight
        self._row_kept *= weight
        self._row_tried *= weight

    def of_all(self) -> FloatArray:
        """float64 [depth]: the shares over all requests."""
        shares: list[float] = []
        before = 0.0
        for kept, tried in zip(self._kept.tolist(), self._tried.tolist(), strict=True):
            lent = _FROM_BEFORE if shares else 1e-6
            before = (kept + lent * before) / (tried + lent)
            shares.append(before)
        return np.array(shares)

    def survival(self, rows: Sequence[RowId]) -> FloatArray:
        """float64 [rows, depth]: how likely a chain of each request is kept up to and including each position."""
        everyone = self.of_all()
        shares = np.tile(everyone, (len(rows), 1))
        known = [(place, self._index[row]) for place, row in enumerate(rows) if row in self._index]
        if known:
            places, at = (list(column) for column in zip(*known, strict=True))
            kept, tried = self._row_kept[at], self._row_tried[at]
            shares[places] = (kept + _FROM_ALL * everyone) / (tried + _FROM_ALL)
        return np.cumprod(shares, axis=1, dtype=np.float64)
