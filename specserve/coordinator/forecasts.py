"""How long rounds took beside what was expected, with drafts and without: where both differ, the beliefs are off.

Costs are learned so that a late round or a change of the machine's pace moves them little. Then what is late more often
than other rounds costs more than is believed, and a pace that was learned with drafts may not hold without. Both show
here, whatever the reason.
"""

from __future__ import annotations

_WEIGHT = 0.06
"""Of one round in a mean, once there were many."""

_PRIOR = 8
"""Rounds that were as expected, which each mean begins with."""

_MOST = 3.0
"""Times what was expected that a round counts for at most."""


class Forecasts:
    """Two running means of taken over expected."""

    def __init__(self) -> None:
        self._means = [1.0, 1.0]  # of plain rounds, of those with drafts
        self._counts = [0, 0]

    def observe(self, drafted: bool, taken_s: float, expected_s: float) -> None:
        """A round took so long, of a size whose cost was measured."""
        self._counts[drafted] += 1
        weight = max(_WEIGHT, 1 / (_PRIOR + self._counts[drafted]))
        self._means[drafted] += weight * (min(taken_s / expected_s, _MOST) - self._means[drafted])

    @property
    def drafted_over_plain(self) -> float:
        """By how much more rounds with drafts are off than those without: above 1 they are dearer than they seem."""
        return self._means[1] / self._means[0]
