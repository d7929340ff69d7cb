"""Answers as server-sent events, to clients that may be slow or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specserve.api.errors import ClientGone, as_specserve, error_body
from specserve.api.generate import DONE, Job, event, events, until_gone
from specserve.api.limits import request_id_of
from specserve.metrics import HttpMetrics
from specserve.text import Tokenizer
from specserve.types import EngineClient

_COMMENT = b": keep-alive\n\n"
_NO_MORE = b": no more"

_LAST_WORDS_S = 5.0
"""Longest time to tell a client that its time is up."""


class EventStream(Response):
    """Sends events as they come. What goes wrong before the first one is raised and so gets a real status.

    A comment before the first event is the beginning too: then what goes wrong is an event.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, engine: EngineClient, tokenizer: Tokenizer, metrics: HttpMetrics) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._job = job
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises ClientGone when the client leaves first."""
        await until_gone(receive, self._job, self._send_all(send, request_id_of(scope)))

    async def _send_all(self, send: Send, request_id: str) -> None:
        client = _Client(send, self.raw_headers, self._job)
        async with aclosing(self._events()) as source:
            try:
                async for each in source:
                    await client.write(each)
            except ClientGone:
                raise
            except Exception as error:
                if not client.began:
                    raise
                self._metrics.stream_failed()
                await client.write(event(error_body(as_specserve(error), request_id)) + DONE)
            await client.end()

    def _events(self) -> AsyncGenerator[bytes, None]:
        source = events(self._job, self._engine, self._tokenizer)
        return with_comments(source, self._job.keepalive_s) if self._job.keepalive_s else source


class _Client:
    """The one who reads a stream. Who does not read until the deadline counts as gone."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], job: Job) -> None:
        self._send_message = send
        self._headers = headers
        self._job = job
        self._until = job.deadline + _LAST_WORDS_S
        self.began = False

    async def write(self, body: bytes) -> None:
        """Send a part of the answer, and before the first one its head, even if the part is empty."""
        if not self.began:
            self.began = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        """Nothing follows."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout_at(self._until):
                await self._send_message(message)
        except OSError:  # how newer ASGI servers say that nobody listens any more; a TimeoutError is one too
            raise self._job.gone() from None


async def with_comments(source: AsyncGenerator[bytes, None], keepalive_s: float) -> AsyncGenerator[bytes, None]:
    """These events, and a comment whenever none came for so long."""
    waiting: asyncio.Task[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(_following(source))
            done, _ = await asyncio.wait({waiting}, timeout=keepalive_s)
            if not done:
                yield _COMMENT
                continue
            following, waiting = waiting.result(), None
            if following == _NO_MORE:
                return
            yield following
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await source.aclose()


async def _following(source: AsyncGenerator[bytes, None]) -> bytes:
    """The next event. A task may not end in StopAsyncIteration, so the end is a word of its own."""
    return await anext(source, _NO_MORE)
