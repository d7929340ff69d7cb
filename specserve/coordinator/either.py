"""R chosen as it goes, 0 included: drafts made ahead of verdicts or, where those come too late, in turns with them.

Both ways are sources of their own, and one of them has the draft worker. The other one holds nothing then: a change
waits until the worker is done with all that it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specserve.coordinator.ahead import AheadDrafts
from specserve.coordinator.batches import CheckedRow
from specserve.coordinator.commits import Commit
from specserve.coordinator.requests import RequestState
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.serial import SerialDrafts
from specserve.coordinator.turns_switch import TurnsSwitch
from specserve.coordinator.worker_drafts import WorkerLink, WorkerSource
from specserve.transport.messages import Failed, Message, Push
from specserve.types import AheadStats, RowId

_PUT_OFF_AT_MOST = 8
"""Rounds without a plan before a change. More than a healthy worker ever needs to end what it was told."""


class EitherDrafts(WorkerSource):
    """A `SerialDrafts` and an `AheadDrafts` in one, for the same draft worker."""

    def __init__(self, link: WorkerLink, clock: Callable[[], float]) -> None:
        super().__init__(link)
        self._serial = SerialDrafts(link)
        self._ahead = AheadDrafts(link)
        self._now: SerialDrafts | AheadDrafts = self._ahead
        self._switch = TurnsSwitch()
        self._clock = clock
        self._began_s: float | None = None
        self._rows = 0  # requests that go on from the round that is over
        self._tokens = 0  # committed to them by it
        self._put_off = 0  # rounds for which nothing was asked for, before a change
        self._met: set[RowId] = set()  # requests that were drafted for since rounds take turns

    @property
    def in_turns(self) -> bool:
        """Whether rounds wait for their drafts now."""
        return self._now is self._serial

    @property
    def hits(self) -> int:
        """Outcomes that were drafted for, and came true."""
        return self._ahead.hits

    @property
    def misses(self) -> int:
        """Rows where others came true."""
        return self._ahead.misses

    @property
    def waiting(self) -> bool:
        """See `WorkerSource`."""
        return self._now.waiting

    @property
    def leasing(self) -> bool:
        """See `WorkerSource`."""
        return self._now.leasing

    @property
    def leased(self) -> int:
        """See `WorkerSource`."""
        return self._now.leased

    @property
    def overdue_s(self) -> float | None:
        """See `WorkerSource`."""
        return self._now.overdue_s

    def begin(self, rows: list[TargetRow]) -> bool:
        """See `WorkerSource`."""
        if self._changing and self._now.idle:
            self._now = self._serial if self._switch.in_turns else self._ahead
            self._met.clear()
        if self.in_turns:
            self._meet([row.state for row in rows])
        self._began_s = self._clock()
        return self._now.begin(rows)

    def _meet(self, states: Sequence[RequestState]) -> None:
        """What was cached as a guess is fed again, now as text: the worker was told of it as a guess only."""
        for state in states:
            if state.row not in self._met:
                state.draft_cached = min(state.draft_cached, state.draft_known)
        self._met.update(state.row for state in states)

    @property
    def _changing(self) -> bool:
        return self._switch.in_turns != self.in_turns

    def ahead(self, rows: list[CheckedRow], now_s: float) -> None:
        """See `WorkerSource`. Nothing new is asked for before a change: so it comes, after what is under way.

        Where it does not come for some rounds, the last word of a plan may be lost, and that of the next one tells it.
        """
        if sum(row.due for row in rows) <= len(rows) // 2:  # mostly prompts, which take time and make no tokens
            self._began_s = None
        self._put_off = self._put_off + 1 if self._changing and self._put_off < _PUT_OFF_AT_MOST else 0
        if not self._put_off:
            self._now.ahead(rows, now_s)

    def committed(self, commits: Sequence[Commit]) -> None:
        """See `WorkerSource`."""
        self._rows = len(commits)
        self._tokens = sum(len(commit.tokens) for commit in commits)
        self._now.committed(commits)

    def settled(self, now_s: float) -> None:
        """See `WorkerSource`."""
        began_s, self._began_s = self._began_s, None
        tokens, self._tokens = self._tokens, 0
        self._now.settled(now_s)
        if self._changing:
            return
        if began_s is not None and tokens:
            promised = None if self.in_turns else self._ahead.promised_in_turns(self._rows)
            self._switch.observe(tokens, self._rows, now_s - began_s, promised)
        self._switch.passed()

    def tidy(self) -> None:
        """See `WorkerSource`."""
        self._now.tidy()

    def foreseen(self, due: int) -> AheadStats:
        """See `WorkerSource`."""
        return self._now.foreseen(due)

    def forget(self, state: RequestState) -> None:
        """See `WorkerSource`."""
        self._now.forget(state)

    def receive(self, message: Message, now_s: float) -> None:
        """See `WorkerSource`. What was pushed ahead and comes doubled is known as such at any time."""
        to = self._serial if isinstance(message, Push) else self._ahead
        to.receive(message, now_s)

    def failed(self, failure: Failed) -> None:
        """See `WorkerSource`."""
        self._now.failed(failure)

    def lose(self, states: Sequence[RequestState]) -> None:
        """See `WorkerSource`."""
        self._now.lose(states)
