"""The open streams of one ingress, and what a coordinator must be told about them. No sockets, no clock, no ray.

Each stream knows what its client has. So nothing is lost with a coordinator, or with the way to one: whoever answers
next is told what is missing (see docs/delivery.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field, replace

from specserve.errors import ClientTooSlow, SpecserveError, Unavailable
from specserve.transport.messages import Cancel, Deltas, Message, Places, Submit
from specserve.types import Delta, Failure, Request, RequestStats

MOST_UNREAD = 4096
"""Rounds that a client may leave unread; the answer of one that reads slower than that is given up."""

MOST_LOSSES = 3
"""Engines that may be lost while they work on a request, without one more token of it: it may be what ends them."""


@dataclass(slots=True)
class Stream:
    """One request and what has come of it. `unread` deltas are those that nobody took yet.

    engine is the one that it was last sent to; it `waits` where that one said that it has no place for it yet, and has
    not begun to work on it. losses may be its fault: of engines that worked on it, for all that is known.
    """

    request: Request
    began_s: float
    unread: asyncio.Queue[Delta] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    told: bool = False  # a round's delta came, and with the first one the scores of the prompt
    sent: bool = False
    engine: str = ""
    waits: bool = False
    losses: int = 0  # since the last token
    refused: bool = False  # by a coordinator, which kept nothing of it
    ended: bool = False
    rounds: int = 0
    drafted: int = 0
    kept: int = 0
    histogram: list[int] = field(default_factory=list)
    accepted_prediction: int = 0
    rejected_prediction: int = 0

    def take(self, delta: Delta, now_s: float) -> None:
        """A delta came. Nothing follows the one that ends the stream."""
        if self.ended:
            return
        if delta.tokens:
            self._count(delta, now_s)
        self.told = self.told or delta.finish is None
        self.ended = delta.finish is not None
        self.refused = delta.finish == "error" and delta.stats is None
        self.unread.put_nowait(delta)

    def _count(self, delta: Delta, now_s: float) -> None:
        if not self.tokens:
            self.first_token_s = now_s - self.began_s
        self.tokens += delta.tokens
        self.losses = 0
        self.rounds += 1
        self.drafted += delta.offered
        self.kept += delta.kept
        self.histogram += [0] * (delta.kept + 1 - len(self.histogram))
        self.histogram[delta.kept] += 1
        self.accepted_prediction += delta.accepted_prediction
        self.rejected_prediction += delta.rejected_prediction

    def fail(self, error: SpecserveError) -> None:
        """End the stream with this error."""
        if not self.ended:
            self.ended = True
            failure = Failure.of(error)
            self.unread.put_nowait(Delta(self.request.id, (), finish="error", failure=failure))

    def lost(self) -> bool:
        """Its engine is gone. Whether another one may have it: one that is there may be the next that it ends."""
        if self.engine and not (self.refused or self.waits):
            self.losses += 1
        self.engine = ""
        return self.losses < MOST_LOSSES

    def go_on(self) -> None:
        """It ended in a failure; another engine takes it from where its client is, or afresh if nothing came of it."""
        if self.refused:
            self.sent = self.told
        self.refused = self.ended = False

    def submission(self, now_s: float, engine: str) -> Submit:
        """What makes this engine begin the request, or go on with it where its client is."""
        self.engine, self.waits = engine, False
        if not self.sent:
            self.sent = True
            return Submit(self.request)
        prompt_logprobs = None if self.told else self.request.prompt_logprobs
        request = replace(self.request, answer=tuple(self.tokens), prompt_logprobs=prompt_logprobs)
        return Submit(request, self._stats(now_s))

    def _stats(self, now_s: float) -> RequestStats:
        return RequestStats(
            prompt_tokens=len(self.request.prompt),
            generated_tokens=len(self.tokens),
            rounds=self.rounds,
            drafted_tokens=self.drafted,
            kept_tokens=self.kept,
            histogram=tuple(self.histogram),
            queue_s=0.0,
            first_token_s=self.first_token_s,
            total_s=now_s - self.began_s,
            accepted_prediction_tokens=self.accepted_prediction,
            rejected_prediction_tokens=self.rejected_prediction,
        )


class Streams:
    """All open streams. `cursor` is the last message of deltas that came, in the coordinator's count.

    engine names the coordinator that is connected, or was last: another name is another engine, with books of its own.
    """

    def __init__(self) -> None:
        self.cursor = 0
        self.engine = ""
        self._open: dict[str, Stream] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, stream: Stream) -> None:
        """A client's request; its stream is open until `close`."""
        self._open[stream.request.id] = stream

    def close(self, stream: Stream) -> Cancel | None:
        """Nobody reads this stream any more. Returns what the coordinator must be told, if anything."""
        del self._open[stream.request.id]
        return None if stream.ended or not stream.sent else Cancel(stream.request.id)

    def take(self, message: Deltas, now_s: float) -> list[Cancel] | None:
        """Hand a round's deltas to their streams. One that came before changes nothing.

        None when messages before it are missing: connect again, and they are sent. Else what is to be cancelled.
        """
        if message.cursor > self.cursor + 1:
            return None
        if message.cursor <= self.cursor:
            return []
        self.cursor = message.cursor
        streams = [self._open.get(delta.request) for delta in message.deltas]
        for stream, delta in zip(streams, message.deltas, strict=True):
            if stream is not None:
                stream.take(delta, now_s)
        return [Cancel(stream.request.id) for stream in streams if stream is not None and _gave_up_on(stream)]

    def place(self, message: Places) -> None:
        """The coordinator says which requests it works on, and which it does not."""
        for request_ids, waits in ((message.waiting, True), (message.begun, False)):
            for request_id in request_ids:
                if request_id in self._open:
                    self._open[request_id].waits = waits

    def welcomed(self, engine: str, known: Collection[str] | None, now_s: float) -> list[Message]:
        """This coordinator is there: what it must be told first.

        known are the requests of this ingress that run there, or whose ends are on their way; None from a coordinator
        that knows nothing of this ingress. Where it is the one of before, only the way to it was lost, or the time to
        find it again: no request can be blamed for that.
        """
        self.engine = engine
        if known is None:
            self.cursor = 0
        running = frozenset(known or ())
        cancels: list[Message] = [Cancel(request_id) for request_id in running if not self._wants(request_id)]
        return cancels + self._missing(running, now_s)

    def _wants(self, request_id: str) -> bool:
        stream = self._open.get(request_id)
        return stream is not None and not stream.ended

    def _missing(self, running: Collection[str], now_s: float) -> list[Message]:
        """In the order in which they came, so that nobody loses a place to a younger request."""
        submissions: list[Message] = []
        for request_id, stream in self._open.items():
            if stream.ended or request_id in running:
                continue
            if stream.engine != self.engine and not stream.lost():
                stream.fail(Unavailable(f"the engine was lost {MOST_LOSSES} times while it worked on this"))
                continue
            submissions.append(stream.submission(now_s, self.engine))
        return submissions

    def fail(self, error: SpecserveError) -> None:
        """End every stream with this error."""
        for stream in self._open.values():
            stream.fail(error)


def _gave_up_on(stream: Stream) -> bool:
    """Whether its client reads so slowly that the answer was given up."""
    if stream.ended or stream.unread.qsize() <= MOST_UNREAD:
        return False
    stream.fail(ClientTooSlow(f"{MOST_UNREAD} rounds of the answer were not read; read faster, or ask for less"))
    return True


async def first_failure_raised(deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """These deltas, as `EngineClient.stream` promises them: a failure that nothing precedes is raised."""
    begun = False
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            if delta.failure is not None and not begun and not delta.tokens:
                raise error_of(delta.failure)
            begun = True
            yield delta


def error_of(failure: Failure) -> SpecserveError:
    """The exception that a failure once was."""
    kinds = [SpecserveError]
    while kinds:
        kind = kinds.pop()
        if kind.code == failure.code:
            return kind(failure.message, param=failure.param)
        kinds.extend(kind.__subclasses__())
    error = SpecserveError(failure.message, param=failure.param)
    error.status, error.code = failure.status, failure.code
    return error
