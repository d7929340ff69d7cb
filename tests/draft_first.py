"""Workers of one engine, of which the draft comes first: what is drafted ahead of a verdict is there when it comes."""

from __future__ import annotations

import threading
from dataclasses import replace

from specserve.local import Parts
from specserve.transport.messages import PlanAhead, Verify

NO_PLAN_S = 0.05
"""A round for which no plan has begun after this time is taken for one that nothing is planned ahead of."""


class _Draft:
    """The draft worker; counts the plans that it has begun, and is through with."""

    def __init__(self, worker, changed: threading.Condition) -> None:
        self.worker, self.changed, self.begun, self.ended = worker, changed, 0, 0

    def handle(self, message):
        return self._told(message) if isinstance(message, PlanAhead) else self.worker.handle(message)

    def _told(self, plan):
        with self.changed:
            self.begun += 1
            self.changed.notify()
        yield from self.worker.handle(plan)
        with self.changed:
            self.ended += 1
            self.changed.notify()


class _Verifier:
    """The verifier; holds each verdict back until the draft worker is through with the plan behind the round."""

    def __init__(self, worker, draft: _Draft) -> None:
        self.worker, self.draft = worker, draft

    def handle(self, message):
        before = self.draft.begun
        replies = list(self.worker.handle(message))
        if isinstance(message, Verify) and message.due.any():
            with self.draft.changed:
                self.draft.changed.wait_for(lambda: self.draft.begun > before, NO_PLAN_S)
                self.draft.changed.wait_for(lambda: self.draft.ended == self.draft.begun, timeout=60)
        return replies


def draft_first(parts: Parts) -> Parts:
    """The same parts, with a verifier that waits for the draft."""
    draft = _Draft(parts.draft_worker, threading.Condition())
    return replace(parts, verifier=_Verifier(parts.verifier, draft), draft_worker=draft)
