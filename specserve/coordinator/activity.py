"""What each worker is doing, moment by moment, on the coordinator's clock.

A worker says how long it computed, not when: clocks of two machines differ. Its computing is placed in the middle of
the round trip, which is right where both ways take equally long (as in NTP, RFC 5905).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from specserve.coordinator.requests import RequestState
from specserve.metrics import EngineMetrics
from specserve.types import DeviceSpan, Role

_OTHER: Mapping[Role, Role] = {"draft": "target", "target": "draft"}
_KEPT_SPANS = 4096


class Share(Protocol):
    """One request's share of a batch."""

    @property
    def state(self) -> RequestState: ...


Watch = Callable[[DeviceSpan, Sequence[Share]], None]
"""Is told of each answered batch, and of the requests in it."""


class Activity:
    """Books every second of every worker as computing, or as waiting for something. Not thread-safe."""

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._settled_s: dict[Role, float] = {}  # roles with a worker
        self._sent: dict[Role, tuple[int, float, int, int, Sequence[Share]]] = {}
        self._away: set[Role] = set()
        self._idle = True
        self._spans: deque[DeviceSpan] = deque(maxlen=_KEPT_SPANS)
        self.watch: Watch | None = None
        self._recent: dict[Role, deque[DeviceSpan]] = {"draft": deque(maxlen=16), "target": deque(maxlen=16)}
        self._unbooked: list[Callable[[], None]] = []
        self._waits: dict[tuple[Role, str], float] = {}  # likewise, seconds

    @property
    def spans(self) -> list[DeviceSpan]:
        """The last batches of both workers, in the order in which they were answered."""
        return list(self._spans)

    def last(self, role: Role) -> DeviceSpan | None:
        """The batch that this worker answered last."""
        return self._recent[role][-1] if self._recent[role] else None

    def sent_at(self, role: Role) -> float | None:
        """When the batch left that this worker has not answered; None where there is none."""
        batch = self._sent.get(role)
        return None if batch is None else batch[1]

    def joined(self, role: Role) -> None:
        """From now on there is a worker of this role."""
        self._settle()
        self._settled_s.setdefault(role, self._clock())
        self._away.discard(role)

    def left(self, role: Role) -> None:
        """The worker is gone, with what it was computing."""
        self._settle()
        batch = self._sent.pop(role, None)
        if batch is not None:
            self._wait(role, "away", self._clock() - batch[1])
        self._away.add(role)

    def idle(self, idle: bool) -> None:
        """Whether there is nothing to do for anybody."""
        if idle != self._idle:
            self._settle()
            self._idle = idle

    def sent(self, role: Role, number: int, rows: int, positions: int, shares: Sequence[Share] = ()) -> None:
        """A batch left for a worker: fed positions and, for the target, drafted ones too. shares are its requests'."""
        self._settle()
        self._sent[role] = (number, self._clock(), rows, positions, shares)

    def returned(self, role: Role, phases: Mapping[str, float]) -> None:
        """The worker answered; it computed for so many seconds in each phase."""
        self._settle()
        batch = self._sent.pop(role, None)
        if batch is None:
            return
        number, sent_s, rows, positions, shares = batch
        now = self._clock()
        busy_s = min(sum(phases.values()), now - sent_s)
        span = DeviceSpan(role, number, sent_s, now, busy_s, rows, positions)
        wire_s = max(0.0, now - sent_s - sum(phases.values()))
        self._unbooked.append(lambda: self._metrics.computed(role, phases, wire_s))
        self._spans.append(span)
        overlap_s = _shared(span, self._recent[_OTHER[role]])
        if overlap_s > 0:
            self._unbooked.append(lambda: self._metrics.overlapped(overlap_s))
        self._recent[role].append(span)
        if self.watch is not None:
            self.watch(span, shares)

    def settle(self) -> None:
        """Book all time up to now."""
        self._settle()
        self.book()

    def book(self) -> None:
        """Tell the metrics what was put off until there is time for it."""
        unbooked, self._unbooked = self._unbooked, []
        for book in unbooked:
            book()
        waits, self._waits = self._waits, {}
        for (role, reason), seconds in waits.items():
            self._metrics.waited(role, reason, seconds)

    def _wait(self, role: Role, reason: str, seconds: float) -> None:
        self._waits[role, reason] = self._waits.get((role, reason), 0.0) + seconds

    def _settle(self) -> None:
        """Divide the time since the last change."""
        now = self._clock()
        for role, since_s in self._settled_s.items():
            reason = self._reason(role)
            if reason is not None:
                self._wait(role, reason, now - since_s)
            self._settled_s[role] = now

    def _reason(self, role: Role) -> str | None:
        """What the worker waits for; None while a batch is under way, which is booked when it returns."""
        if role in self._away:
            return "away"
        if role in self._sent:
            return None
        if self._idle:
            return "idle"
        return "peer" if _OTHER[role] in self._sent else "coordinator"


def _shared(span: DeviceSpan, others: deque[DeviceSpan]) -> float:
    """Seconds in which the other worker computed, too; its batches are in the order of their ends."""
    began_s, ended_s, shared_s = span.began_s, span.ended_s, 0.0
    for other in reversed(others):
        if other.ended_s <= began_s:
            break
        shared_s += max(0.0, min(ended_s, other.ended_s) - max(began_s, other.began_s))
    return shared_s
