"""How long requests go without drafts because the slot pool has none to give."""

from __future__ import annotations

from collections.abc import Callable

from specserve.metrics import EngineMetrics


class SlotWaits:
    """Counts the time from the plan for which slots lacked to the one that gets some, request by request."""

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._since_s: dict[int, float] = {}  # by row

    @property
    def any(self) -> bool:
        """Some request waits."""
        return bool(self._since_s)

    def planned(self, row: int, *, lacking: bool) -> None:
        """A plan that was to draft for this request was made; lacking: it got no slot, as none was left."""
        if lacking:
            self._since_s.setdefault(row, self._clock())
        elif self._since_s and (since_s := self._since_s.pop(row, None)) is not None:
            self._metrics.waited_for_slots(self._clock() - since_s)

    def forget(self, row: int) -> None:
        """The request ended, or begins anew: it waits no more."""
        self._since_s.pop(row, None)
