"""What a step of a model costs, learned from what the workers report: seconds by number of rows."""

from __future__ import annotations

_WEIGHT = 0.1
"""Of a new measurement in the running mean."""


class StepCost:
    """Running means of the seconds of a step, by rows in powers of two. Nothing is assumed of the curve's shape."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took this long. The first measurement of a size counts as its mean."""
        size = rows.bit_length()
        known = self._means.get(size)
        self._means[size] = seconds if known is None else known + _WEIGHT * (seconds - known)

    def seconds(self, rows: int) -> float | None:
        """What a step of so many rows is expected to take, by the nearest size seen; None before the first one."""
        if not self._means:
            return None
        size = rows.bit_length()
        return self._means[min(self._means, key=lambda seen: (abs(seen - size), seen))]


class Mean:
    """A running mean; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float) -> None:
        """Take a value in."""
        self.value = value if self.value is None else self.value + _WEIGHT * (value - self.value)
