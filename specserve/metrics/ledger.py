"""One text for all processes of a deployment, in which no counter ever falls.

A scrape reaches one of several processes, and processes die. Whoever holds the ledger keeps the newest snapshot of
each; those that are gone keep their counters in the sum and lose their gauges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specserve.metrics.board import Series, Snapshot, render
from specserve.metrics.table import ENGINE_METRICS, HTTP_METRICS, LEDGER_METRICS

_GAUGES = frozenset(metric.name for metric in (*ENGINE_METRICS, *HTTP_METRICS) if metric.kind == "gauge")
_TABLE = (*ENGINE_METRICS, *HTTP_METRICS, *LEDGER_METRICS)
_MOST_PLACES = 64
COORDINATOR = "coordinator"
"""What the places of coordinators begin with; all others are HTTP processes."""


@dataclass(slots=True)
class _Entry:
    snapshot: Snapshot
    heard_s: float


class Ledger:
    """Snapshots by place: a place holds one process after another, never two at once. Not thread-safe.

    lease_s is the silence after which a process's gauges no longer count.
    """

    def __init__(
        self, *, aliases: bool = True, lease_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._aliases = aliases
        self._lease_s = lease_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._past: dict[Series, float] = {}

    def take(self, place: str, snapshot: Snapshot) -> None:
        """Keep the newest snapshot of a place. A new life there puts the counters of the old one into the past."""
        known = self._entries.get(place)
        if known is not None and known.snapshot.life == snapshot.life:
            if snapshot.number < known.snapshot.number:  # overtaken on the way
                return
        elif known is not None:
            self._bury(place)
        self._entries[place] = _Entry(snapshot, self._clock())
        self._forget_oldest()

    def values(self) -> dict[Series, float]:
        """Sums over all processes: of counters over dead and living ones, of gauges over those heard of lately."""
        total = dict(self._past)
        for entry in self._entries.values():
            _add(total, entry.snapshot.values, gauges=self._lives(entry))
        ingresses = [
            place for place, entry in self._entries.items() if not place.startswith(COORDINATOR) and self._lives(entry)
        ]
        total[LEDGER_METRICS[0].name, ()] = len(ingresses)
        return total

    def render(self) -> str:
        """Prometheus text format 0.0.4."""
        return render(self.values(), _TABLE, aliases=self._aliases)

    def _lives(self, entry: _Entry) -> bool:
        return self._clock() - entry.heard_s <= self._lease_s

    def _bury(self, place: str) -> None:
        _add(self._past, self._entries.pop(place).snapshot.values, gauges=False)

    def _forget_oldest(self) -> None:
        """Replicas come and go for ever; what is kept of them must not grow. Only silent ones are summed up."""
        if len(self._entries) > _MOST_PLACES:
            oldest = min(self._entries, key=lambda place: self._entries[place].heard_s)
            if not self._lives(self._entries[oldest]):
                self._bury(oldest)


def _add(total: dict[Series, float], values: Mapping[Series, float], *, gauges: bool) -> None:
    for series, value in values.items():
        if gauges or series[0] not in _GAUGES:
            total[series] = total.get(series, 0.0) + value
