"""What clients are to be told, by owner, until it is handed over in one go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from specserve.coordinator.commits import Verdicts
from specserve.metrics import EngineMetrics
from specserve.types import Delta

Sink = Callable[[str, tuple[Delta, ...]], None]
"""Takes all deltas of one owner since the last flush."""

PATIENCE_S: Final = 0.25
"""How often what may wait is told: answers that nobody reads before their end.

Telling a round costs coordinator and ingress about what committing it costs. What was not told when a coordinator dies
is computed again; so the first tokens that a coordinator adds to an answer are told at once, and show that it got on.
"""


@dataclass(slots=True)
class _Told:
    """What an owner is to be told; `due` when somebody waits for it."""

    deltas: list[Delta] = field(default_factory=list)
    due: bool = False


class Outbox:
    """Deltas, and the last round, whose deltas and numbers are made when the next one is on its way."""

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._told_all_s = -math.inf
        self._unbooked: Verdicts | None = None

    def put(self, owner: str, delta: Delta, *, patient: bool = False) -> None:
        """Tell an owner, after all that was put here before; patient where that may wait for a while."""
        told = self._told.get(owner)
        if told is None:
            told = self._told[owner] = _Told()
        told.deltas.append(delta)
        told.due = told.due or not patient

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
                state = commit.state
                self.put(state.owner, commit.delta(), patient=state.request.patient and state.told)
                state.told = True
        self._metrics.committed(booked)
        return True

    def forget_round(self) -> None:
        """The books cannot be trusted: say no more of the last round."""
        self._unbooked = None

    def hand_over(self, sink: Sink) -> None:
        """Give each owner its deltas, where somebody waits for any of them, and every now and then in any case."""
        if not self._told:
            return
        now_s = self._clock()
        if now_s >= self._told_all_s + PATIENCE_S:
            self._told_all_s, owners = now_s, list(self._told)
        else:
            owners = [owner for owner, told in self._told.items() if told.due]
        for owner in owners:
            sink(owner, tuple(self._told.pop(owner).deltas))
