"""How often drafted tokens are kept, by place in a chain or tree: of each request, and of all together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.coordinator.costs import FloatArray
from specserve.coordinator.depth import Checked
from specserve.types import RowId

_FIRST = (0.6, 4.0)
"""Before anything was seen: the share kept at the first position, and how many observations that counts for."""

_FADE = 0.99
"""Weight of what was seen, one round later."""

_LONGEST_FADE = 20
"""Rounds without an observation that the next one fades for, at most: it then counts for about a fifth of all."""

_FROM_BEFORE = 2.0
"""Observations that a position's estimate borrows from the position before it."""

_HARDLY = 1e-6
"""Observations that the first one borrows, so that nothing is divided by 0 when all that was seen has faded."""

_FROM_ALL = 16.0
"""Observations that a request's estimate borrows from all requests."""


class Acceptance:
    """Shares of drafts kept at position j when those before were kept; what was seen long ago fades.

    A tree's position has several tokens side by side, of which one at most is kept: rank 0 is the first of them, and a
    chain's only one. Each position leans on the one before it, each rank of the first one on those before it, and each
    request on all of them, so that what was tried rarely, or not for long, is judged by what it most resembles. Nothing
    here looks at a draft's own token or probability.
    """

    def __init__(self, depth: int, width: int = 1) -> None:
        self._kept = np.zeros((depth, width))
        self._tried = np.zeros((depth, width))
        self._kept[:1, :1], self._tried[:1, :1] = _FIRST[0] * _FIRST[1], _FIRST[1]
        self._places = np.arange(depth)
        self._index: dict[RowId, int] = {}
        self._row_kept = np.zeros((0, depth, width))
        self._row_tried = np.zeros((0, depth, width))

    def keep_only(self, rows: Sequence[RowId]) -> None:
        """Forget the requests that are none of these."""
        known = [row for row in rows if row in self._index]
        at = [self._index[row] for row in known]
        self._row_kept, self._row_tried = self._row_kept[at], self._row_tried[at]
        self._index = {row: index for index, row in enumerate(known)}

    def observe(self, checked: Sequence[Checked], elapsed: int) -> None:
        """These requests offered drafts, none of them empty; `elapsed` rounds since the last.

        A request is named once at most.
        """
        at = self._indices([each.row for each in checked])
        self._fade(_FADE ** min(max(1, elapsed), _LONGEST_FADE))
        tried, good = np.zeros((2, len(checked), *self._kept.shape))
        _, offered, kept = (np.array(column)[:, None] for column in list(zip(*checked, strict=True))[:3])
        tried[:, :, 0] = self._places < np.minimum(offered, kept + 1)
        good[:, :, 0] = self._places < kept
        for index, each in enumerate(checked):
            if each.met is not None:
                tried[index], good[index] = self._met(each.met)
        self._tried += tried.sum(0)
        self._kept += good.sum(0)
        self._row_tried[at] += tried
        self._row_kept[at] += good

    def _met(self, families: Sequence[tuple[int, int]]) -> FloatArray:
        """float64 [2, depth, width]: what was tried, and what was kept, of these families."""
        tried, good = found = np.zeros((2, *self._kept.shape))
        for level, (siblings, rank) in enumerate(families):
            tried[level, :siblings] = 1
            if rank >= 0:
                good[level, rank] = 1
        return found

    def _indices(self, rows: Sequence[RowId]) -> list[int]:
        for row in rows:
            self._index.setdefault(row, len(self._index))
        lacking = len(self._index) - len(self._row_kept)
        if lacking > 0:
            more = np.zeros((lacking, *self._kept.shape))
            self._row_kept = np.concatenate([self._row_kept, more])
            self._row_tried = np.concatenate([self._row_tried, more])
        return [self._index[row] for row in rows]

    def _fade(self, weight: float) -> None:
        self._kept *= weight
        self._tried *= weight
        self._row_kept *= weight
        self._row_tried *= weight

    def of_all(self) -> FloatArray:
        """float64 [depth, width]: the shares over all requests."""
        shares: list[list[float]] = []
        for kept, tried in zip(self._kept.tolist(), self._tried.tolist(), strict=True):
            shares.append(_leaning(kept, tried, shares[-1] if shares else None))
        return np.array(shares)

    def shares(self, rows: Sequence[RowId]) -> FloatArray:
        """float64 [rows, depth, width]: how often the draft of that rank is kept, when what is before it was."""
        everyone = self.of_all()
        shares: FloatArray = np.tile(everyone, (len(rows), 1, 1))
        known = [(place, self._index[row]) for place, row in enumerate(rows) if row in self._index]
        if known:
            places, at = (list(column) for column in zip(*known, strict=True))
            kept, tried = self._row_kept[at], self._row_tried[at]
            shares[places] = (kept + _FROM_ALL * everyone) / (tried + _FROM_ALL)
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
