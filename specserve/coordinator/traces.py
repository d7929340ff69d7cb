"""Spans of traced requests: their queue and prompt, and each batch of draft and verifier that they had a share in.

Workers know nothing of this: a batch's span is its round trip as the coordinator saw it, with the time that the worker
computed beside it. What happens is noted as it happens, and written when the workers are busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from specserve.coordinator.activity import Activity, Share
from specserve.coordinator.commits import Commit, Verdicts
from specserve.coordinator.requests import RequestState
from specserve.tracing import Attributes, Span, Tracer
from specserve.types import DeviceSpan, Failure, FinishReason, RequestStats


class RequestTraces:
    """Follows the requests that came with a `trace`. Not thread-safe."""

    def __init__(self, tracer: Tracer, activity: Activity, clock: Callable[[], float]) -> None:
        self._tracer = tracer
        self._clock = clock
        self._zero_s = time.time() - clock()  # of the clock, since the epoch
        self._open: dict[int, Span] = {}
        self._rounds: dict[int, DeviceSpan] = {}  # verifications whose verdict is being committed
        self._unwritten: list[Callable[[], None]] = []
        activity.watch = self._computed

    def admitted(self, state: RequestState) -> None:
        """A request came in."""
        if state.request.trace is None:
            return
        parent = {"traceparent": state.request.trace}
        about: Attributes = {"specserve.request": state.request.id, "specserve.branch": state.request.branch}
        span = self._tracer.start("request", parent, about, at_s=self._zero_s + state.arrived_s)
        if span is not None:
            state.trace = span.traceparent
            self._open[state.row] = span

    def _computed(self, span: DeviceSpan, shares: Sequence[Share]) -> None:
        """A worker answered. Rounds of the verifier are written when it is known what they brought."""
        if span.role == "target":
            self._rounds = {span.number: span}
        elif self._open:
            self._unwritten.append(partial(self._drafted, span, [share.state for share in shares]))

    def committed(self, verdicts: Verdicts) -> None:
        """A round of the verifier was committed."""
        span = self._rounds.pop(verdicts.round.number, None)
        if span is not None:
            self._unwritten.append(partial(self._verified, span, verdicts))

    def ended(self, state: RequestState, finish: FinishReason, stats: RequestStats, failure: Failure | None) -> None:
        """A request is over."""
        span = self._open.pop(state.row, None)
        if span is not None:
            self._unwritten.append(partial(self._finish, span, state, finish, stats, failure))

    def write(self) -> None:
        """Make spans of what was noted."""
        unwritten, self._unwritten = self._unwritten, []
        for each in unwritten:
            each()

    # ---- spans

    def _drafted(self, span: DeviceSpan, states: Sequence[RequestState]) -> None:
        about = _batch(span)
        for state in states:
            if state.trace is not None:
                self._record("draft", state.trace, span.sent_s, span.arrived_s, about)

    def _verified(self, span: DeviceSpan, verdicts: Verdicts) -> None:
        about = _batch(span)
        commits = {commit.state.row: commit for commit in verdicts.commits}
        for row in verdicts.round.rows:
            state = row.state
            if state.trace is not None:
                own = {"specserve.fed_tokens": row.feed, **_outcome(commits.get(state.row))}
                self._record("verify", state.trace, span.sent_s, span.arrived_s, {**about, **own})

    def _finish(
        self, span: Span, state: RequestState, finish: FinishReason, stats: RequestStats, failure: Failure | None
    ) -> None:
        began_s, ended_s = state.arrived_s, state.arrived_s + stats.total_s
        started_s = ended_s if state.started_s is None else state.started_s
        self._record("queue", span.traceparent, began_s, started_s, {})
        if state.started_s is not None:
            first_s = ended_s if state.first_token_s is None else state.first_token_s
            self._record("prefill", span.traceparent, started_s, first_s, {"specserve.tokens": stats.prompt_tokens})
        span.set(_totals(finish, stats))
        if failure is not None:
            span.set({"error.type": failure.code})
        span.end(self._zero_s + ended_s, failed=failure is not None)

    def _record(self, name: str, traceparent: str, began_s: float, ended_s: float, attributes: Attributes) -> None:
        self._tracer.record(name, traceparent, self._zero_s + began_s, self._zero_s + ended_s, attributes)


def _batch(span: DeviceSpan) -> dict[str, str | int | float]:
    """What is the same for all requests of a batch. rows and positions are those of all of them."""
    return {
        "specserve.role": span.role,
        "specserve.batch": span.number,
        "specserve.batch_rows": span.rows,
        "specserve.batch_positions": span.positions,
        "specserve.busy_s": span.busy_s,
    }


def _outcome(commit: Commit | None) -> dict[str, str | int]:
    """What a round brought to one request; nothing where no token was due, as amid a prompt."""
    if commit is None:
        return {}
    return {
        "specserve.drafted": commit.checked,
        "specserve.accepted": commit.kept,
        "specserve.tokens": len(commit.tokens),
        "specserve.chosen": commit.chosen,
    }


def _totals(finish: FinishReason, stats: RequestStats) -> dict[str, str | int]:
    return {
        "specserve.finish": finish,
        "specserve.rounds": stats.rounds,
        "specserve.drafted": stats.drafted_tokens,
        "specserve.accepted": stats.kept_tokens,
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.output_tokens": stats.generated_tokens,
    }
