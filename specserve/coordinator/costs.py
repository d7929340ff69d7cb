"""What a step of a model costs, learned from what the workers report: seconds by number of rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_WEIGHT = 0.1
"""Of a new measurement in the running mean."""

_KEPT = 15
"""Measurements of one size that its median is taken of."""

_SIZE_WEIGHT = 0.2
"""Of a new size among the nearly equal ones that count as one."""

_PER_DOUBLING = 4
"""Sizes told apart between one and twice as much."""

_NO_TIME_S = 1e-6
"""A clock that did not move says no more than that a round was shorter than this."""

_COMMON = 0.9
"""Of a change in one kind of round, how much is held to be a change in all of them, in logarithms."""

_FORGOTTEN = 500
"""Measurements after which a size that none of them was of is forgotten."""

_TRUSTED, _MANY = 3, 8
"""Measurements of a size from which on it is believed where others are known, and from which on its median is taken.
The first steps of a size take longer than all others; to believe them would mean never to see any others."""


class Mean:
    """A running mean; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float) -> None:
        """Take a value in."""
        self.value = value if self.value is None else self.value + _WEIGHT * (value - self.value)


class _Size:
    """The newest measurements of one size, in units of `scale` seconds."""

    def __init__(self) -> None:
        self.size = 0.0
        self.seen = deque[float](maxlen=_KEPT)
        self.scale = 1.0
        self.at = 0
        self._middle: float | None = None  # until it is asked for

    @property
    def seconds(self) -> float:
        if self._middle is None:
            self._middle = median(self.seen) if len(self.seen) >= _MANY else min(self.seen)
        return self._middle * self.scale

    def observe(self, size: int, seconds: float, at: int) -> None:
        self.size = size if not self.seen else self.size + _SIZE_WEIGHT * (size - self.size)
        self.seen.append(max(seconds, _NO_TIME_S) / self.scale)
        self._middle = None
        self.at = at


class Curve:
    """Seconds by size, in sizes about a fifth apart: medians of the newest measurements, made to rise with the size.

    Medians, because what disturbs a measurement is a late thread or a busy neighbour, and always makes it longer; of
    few measurements the shortest, for the same reason, and of very few none, where others were measured more often. The
    rising fit pools neighbours that contradict each other (isotonic regression, Ayer et al. 1955). Beyond the largest
    size seen the curve is flat: what was never tried counts as cheap, so it is tried. A size that was not seen for
    `_FORGOTTEN` measurements is forgotten, and so is tried again.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._count = 0
        self._fit: tuple[list[float], list[float]] | None = None  # sizes and seconds

    def observe(self, size: int, seconds: float) -> None:
        """A step of this size, at least 1, took this long."""
        self._count += 1
        self._fit = None
        key = _bin(size)
        known = self._sizes.get(key)
        if known is None:
            known = self._sizes[key] = _Size()
        known.observe(size, seconds, self._count)

    def settled(self, size: int) -> float | None:
        """Seconds of the steps of just this size; None while they are too few to say."""
        known = self._sizes.get(_bin(size))
        return known.seconds if known is not None and len(known.seen) == _KEPT else None

    def stretch(self, factor: float, but: int | None = None) -> None:
        """All sizes, but for one, take so many times as long as was known."""
        kept = None if but is None else _bin(but)
        self._fit = None
        for key, each in self._sizes.items():
            if key != kept:
                each.scale *= factor

    def knows(self, size: int) -> bool:
        """Whether a size within a factor of two was measured."""
        here = _bin(size)
        return any(abs(each - here) <= _PER_DOUBLING for each in self._sizes)

    def at(self, size: int) -> float | None:
        """`seconds` for one size, which is asked dozens of times a round and so without arrays; None likewise."""
        if not self._sizes:
            return None
        known, seconds = self._rising_fit()
        above = bisect_right(known, size)
        if above in (0, len(known)):
            return seconds[max(0, above - 1)]
        here = above - 1
        slope = (seconds[above] - seconds[here]) / (known[above] - known[here])
        return slope * (size - known[here]) + seconds[here]

    def function(self) -> Callable[[FloatArray], FloatArray] | None:
        """`seconds` as it is now; None before the first measurement."""
        if not self._sizes:
            return None
        known, seconds = self._rising_fit()
        return lambda sizes: np.interp(sizes, known, seconds)

    def seconds(self, sizes: FloatArray, origin: tuple[float, float] | None = None) -> FloatArray | None:
        """float64 [n] for float64 [n]: seconds expected of each size; None before the first measurement.

        origin: a size and its seconds, known from elsewhere; below the smallest size seen, times fall towards it.
        """
        if not self._sizes:
            return None
        known, seconds = self._rising_fit()
        if origin is not None and origin[0] < known[0]:
            known, seconds = [origin[0], *known], [origin[1], *seconds]
        return np.interp(sizes, known, seconds)

    def _rising_fit(self) -> tuple[list[float], list[float]]:
        if self._fit is None:
            oldest = self._count - _FORGOTTEN
            self._sizes = {key: each for key, each in self._sizes.items() if each.at > oldest}
            every = [self._sizes[key] for key in sorted(self._sizes)]
            points = [each for each in every if len(each.seen) >= _TRUSTED] or every
            rising = _rising([each.seconds for each in points], [len(each.seen) for each in points])
            self._fit = [each.size for each in points], rising
        return self._fit


def _bin(size: int) -> int:
    return round(_PER_DOUBLING * math.log2(size))


def _rising(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The nearest sequence that never falls, by weighted squares: pool neighbours that fall."""
    pools: list[tuple[float, int, int]] = []  # value, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            pool = _pooled(pools.pop(), pool)
        pools.append(pool)
    return [value for value, _, count in pools for _ in range(count)]


def _pooled(left: tuple[float, int, int], right: tuple[float, int, int]) -> tuple[float, int, int]:
    weight = left[1] + right[1]
    return (left[0] * left[1] + right[0] * right[1]) / weight, weight, left[2] + right[2]


class RoundCosts:
    """Seconds of rounds of decode rows, coordinator's time included, as they were measured.

    plain: while nothing is drafted; bare: no drafts to check, though drafting goes on; both by rows. checked: with
    drafts, by positions. draft_step: what a round waits for one step of drafting, by the tokens that it makes, at least
    one for each row; taken off the others.

    What slows down one kind of round slows down all of them, as longer contexts or a busy host do: most of a change
    in what was just measured is carried over to the rest, so that it can be compared with what was measured long ago.
    """

    def __init__(self) -> None:
        self.plain, self.bare, self.checked, self.draft_step = Curve(), Curve(), Curve(), Curve()

    def observe(self, curve: Curve, size: int, seconds: float) -> None:
        """A round of the kind of one of the first three curves took this long."""
        before = curve.settled(size)
        curve.observe(size, seconds)
        after = curve.settled(size)
        factor = 1.0 if before is None or after is None else (after / before) ** _COMMON
        if factor != 1.0:
            for each in (self.plain, self.bare, self.checked, self.draft_step):
                each.stretch(factor, but=size if each is curve else None)

    @property
    def step_seconds(self) -> Callable[[FloatArray], FloatArray] | None:
        """Seconds of steps of drafting that make so many tokens; None where no round was seen to wait for any."""
        return self.draft_step.function()

    def plain_s(self, rows: int) -> float | None:
        """Seconds of plain decoding, by what resembles it most; None when nothing is known."""
        for curve in (self.plain, self.bare, self.checked):
            found = curve.at(rows)
            if found is not None:
                return found
        return None

    def seconds(self, rows: int, slots: FloatArray) -> FloatArray:
        """float64 [n] for float64 [n] slots, of which the first is 0. Only when something is known of plain rounds.

        No round with drafts costs less than one without: more work takes no less time, so what says otherwise is noise.
        """
        plain = self.plain_s(rows) or 0.0
        checked = self.checked.seconds(rows + slots, (rows, plain))
        found = np.full(len(slots), plain) if checked is None else np.maximum(checked, plain)
        found[0] = max(self.bare.at(rows) or plain, plain) if self.bare.knows(rows) else plain
        return found
