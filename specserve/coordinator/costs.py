"""What a step of a model costs, learned from what the workers report: seconds by number of rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from statistics import median

_WEIGHT = 0.1
"""Of a new measurement in the running mean."""

_KEPT = 15
"""Measurements of one size that its median is taken of."""

SIZE_WEIGHT = 0.2
"""Of a new size among the nearly equal ones that count as one."""

PER_DOUBLING = 4
"""Sizes told apart between one and twice as much."""

NO_TIME_S = 1e-6
"""A clock that did not move says no more than that a round was shorter than this."""

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
    """The newest measurements of one size."""

    def __init__(self) -> None:
        self.size = 0.0
        self.seen = deque[float](maxlen=_KEPT)
        self.at = 0
        self._middle: float | None = None  # until it is asked for

    @property
    def seconds(self) -> float:
        if self._middle is None:
            self._middle = median(self.seen) if len(self.seen) >= _MANY else min(self.seen)
        return self._middle

    def observe(self, size: int, seconds: float, at: int) -> None:
        self.size = size if not self.seen else self.size + SIZE_WEIGHT * (size - self.size)
        self.seen.append(max(seconds, NO_TIME_S))
        self._middle = None
        self.at = at


class Curve:
    """Seconds by size, in sizes about a fifth apart: medians of the newest measurements, made to rise with the size.

    Medians, because what disturbs a measurement is a late thread or a busy neighbour, and always makes it longer; of
    few measurements the shortest, for the same reason, and of very few none, where others were measured more often. The
    rising fit pools neighbours that contradict each other (isotonic regression). Beyond the largest
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
        key = bin_of(size)
        known = self._sizes.get(key)
        if known is None:
            known = self._sizes[key] = _Size()
        known.observe(size, seconds, self._count)

    def at(self, size: int) -> float | None:
        """Seconds expected of a size, which is asked dozens of times a round and so without arrays; None before any."""
        if not self._sizes:
            return None
        known, seconds = self._rising_fit()
        above = bisect_right(known, size)
        if above in (0, len(known)):
            return seconds[max(0, above - 1)]
        here = above - 1
        slope = (seconds[above] - seconds[here]) / (known[above] - known[here])
        return slope * (size - known[here]) + seconds[here]

    def _rising_fit(self) -> tuple[list[float], list[float]]:
        if self._fit is None:
            oldest = self._count - _FORGOTTEN
            self._sizes = {key: each for key, each in self._sizes.items() if each.at > oldest}
            every = [self._sizes[key] for key in sorted(self._sizes)]
            points = [each for each in every if len(each.seen) >= _TRUSTED] or every
            fitted = rising([each.seconds for each in points], [len(each.seen) for each in points])
            self._fit = [each.size for each in points], fitted
        return self._fit


def bin_of(size: int) -> int:
    """Which of the sizes that are told apart this one, at least 1, counts as."""
    return round(PER_DOUBLING * math.log2(size))


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls, by weighted squares: pool neighbours that fall (Ayer et al. 1955)."""
    pools: list[tuple[float, float, int]] = []  # value, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            pool = _pooled(pools.pop(), pool)
        pools.append(pool)
    return [value for value, _, count in pools for _ in range(count)]


def _pooled(left: tuple[float, float, int], right: tuple[float, float, int]) -> tuple[float, float, int]:
    weight = left[1] + right[1]
    return (left[0] * left[1] + right[0] * right[1]) / weight, weight, left[2] + right[2]
