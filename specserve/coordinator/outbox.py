"""What clients are to be told, by owner, until it is handed over in one go."""

from __future__ import annotations

from collections.abc import Callable

from specserve.coordinator.commits import Verdicts
from specserve.metrics import EngineMetrics
from specserve.types import Delta

Sink = Callable[[str, tuple[Delta, ...]], None]
"""Takes all deltas of one owner since the last flush."""


class Outbox:
    """Deltas, and the last round, whose deltas and numbers are made when the next one is on its way."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._deltas: dict[str, list[Delta]] = {}
        self._unbooked: Verdicts | None = None

    def put(self, owner: str, delta: Delta) -> None:
        """Tell an owner, after all that was put here before."""
        self._deltas.setdefault(owner, []).append(delta)

    def put_off(self, committed: Verdicts) -> None:
        """Keep a committed round until there is time for it."""
        self._unbooked = committed

    def book(self) -> bool:
        """Tell of the round that was put off: its deltas, where answers go on, and its numbers. False without one."""
        booked, self._unbooked = self._unbooked, None
        if booked is None:
            return False
        for commit in booked.commits:
            if commit.finish is None:
                self.put(commit.state.owner, commit.delta())
        self._metrics.committed(booked)
        return True

    def forget_round(self) -> None:
        """The books cannot be trusted: say no more of the last round."""
        self._unbooked = None

    def hand_over(self, sink: Sink) -> None:
        """Give each owner its deltas."""
        if not self._deltas:
            return
        deltas, self._deltas = self._deltas, {}
        for owner, listed in deltas.items():
            sink(owner, tuple(listed))
