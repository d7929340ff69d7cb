"""The last minutes, second by second: what the status page draws and the stats line sums up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

SECONDS = 300


@dataclass(slots=True)
class Moment:
    """Amounts of one second. Levels (running, waiting) are the last ones seen in it; times are seconds."""

    tokens: float = 0
    prefill_tokens: float = 0
    drafts: float = 0
    drafted: float = 0
    kept: float = 0
    target_busy_s: float = 0
    draft_busy_s: float = 0
    overlap_s: float = 0
    running: float = 0
    waiting: float = 0
    slots_held: float = 0

    def add(self, other: Moment) -> None:
        """Sum up amounts; levels are taken over."""
        for name in _AMOUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _LEVELS:
            setattr(self, name, getattr(other, name))


_LEVELS = ("running", "waiting", "slots_held")
_AMOUNTS = tuple(each.name for each in fields(Moment) if each.name not in _LEVELS)


class History:
    """A ring of `SECONDS` moments. Written by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moments: dict[int, Moment] = {}
        self._began = int(clock())
        self._level = (0.0, 0.0, 0.0)

    def now(self) -> Moment:
        """The moment that is being written."""
        second = int(self._clock())
        found = self._moments.get(second)
        if found is None:
            found = self._moments[second] = Moment()
            self._keep(found)
            for old in [key for key in self._moments if key <= second - SECONDS]:
                del self._moments[old]
        return found

    def level(self, running: int, waiting: int, slots_held: int) -> None:
        """Levels as they are from now on."""
        self._level = running, waiting, slots_held
        self._keep(self.now())

    def _keep(self, moment: Moment) -> None:
        moment.running, moment.waiting, moment.slots_held = self._level

    def columns(self) -> dict[str, list[float]]:
        """One list per field, oldest first, for the whole seconds since the start, at most the last `SECONDS`."""
        now = int(self._clock())
        moments = dict(self._moments)
        seconds = range(max(self._began, now - SECONDS), now)
        return {
            each.name: [round(getattr(m, each.name), 4) for m in _filled(moments, seconds)] for each in fields(Moment)
        }

    def window(self, seconds: int) -> Moment:
        """The sum over the last whole seconds."""
        now = int(self._clock())
        total = Moment()
        for moment in _filled(dict(self._moments), range(now - seconds, now)):
            total.add(moment)
        return total


def _filled(moments: dict[int, Moment], seconds: range) -> list[Moment]:
    """A moment for each second: where nothing was written, nothing flowed and the levels stayed."""
    filled: list[Moment] = []
    for second in seconds:
        before = filled[-1] if filled else Moment()
        found = moments.get(second)
        filled.append(found or Moment(**{name: getattr(before, name) for name in _LEVELS}))
    return filled
