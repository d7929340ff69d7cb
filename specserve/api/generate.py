"""Running requests in the engine for one HTTP answer: merging their deltas, and noticing a client that left.

Every engine stream is closed on every way out, in the task that reads it, so that a cancelled or abandoned answer
gives back within one delta what it held.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive

from specserve.api import objects as out
from specserve.api.answers import Answer
from specserve.api.errors import ClientGone, failure_of
from specserve.api.objects import Head
from specserve.api.origins import origins_field
from specserve.api.shapes import Shape
from specserve.api.tools import CallReader
from specserve.errors import DeadlineExceeded, SpecserveError
from specserve.templates import CallFormat
from specserve.text import Tokenizer
from specserve.types import Delta, EngineClient, Request

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request for text, ready to run: a request per sequence. `deadline` is in the event loop's time.

    A stream that is silent for keepalive_s seconds says so with a comment, 0 never. `began` is set when the engine has
    made the first token of any sequence.

    calls is how the answers write tool calls, None where none may.
    """

    head: Head
    shape: Shape
    requests: Sequence[Request]
    deadline: float
    echo: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    origins: bool = False
    keep_stop: bool = False
    token_ids: bool = False
    calls: CallFormat | None = None
    keepalive_s: float = 0.0
    began: asyncio.Event = field(default_factory=asyncio.Event)

    def gone(self) -> ClientGone:
        """What to raise when the client leaves now."""
        return ClientGone("answer" if self.began.is_set() else "waiting")

    def answers(self, tokenizer: Tokenizer) -> list[Answer]:
        """An answer to be filled for each sequence."""
        return [
            Answer(
                request,
                tokenizer,
                echo=self.echo,
                keep_stop=self.keep_stop,
                reader=None if self.calls is None else CallReader(self.calls),
            )
            for request in self.requests
        ]


async def collect(job: Job, engine: EngineClient, tokenizer: Tokenizer) -> dict[str, Any]:
    """The whole answer as one object. Raises what ended any of its sequences."""
    answers = job.answers(tokenizer)
    async with aclosing(_deltas(job, engine)) as deltas:
        async for index, delta in deltas:
            answers[index].add(delta)
    return out.whole_answer(job.head, job.shape, answers, tokenizer, token_ids=job.token_ids)


async def events(job: Job, engine: EngineClient, tokenizer: Tokenizer) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, one piece per delta, usage and [DONE] at the end.

    Raises what ended any of its sequences, before the first piece or after it.
    """
    answers = job.answers(tokenizer)
    opened: set[int] = set()
    async with aclosing(_deltas(job, engine)) as deltas:
        async for index, delta in deltas:
            chunks = _chunks(job, index, answers[index], delta, tokenizer, first=index not in opened)
            opened.add(index)
            yield b"".join(event(_with_usage(job, chunk, answers)) for chunk in chunks)
    tail = [out.usage_chunk(job.head, job.shape, answers)] if job.include_usage else []
    yield b"".join([*map(event, tail), DONE])


async def until_gone(receive: Receive, job: Job, work: Coroutine[Any, Any, T]) -> T:
    """Do the work for a job. Raises ClientGone, with the work cancelled and unwound, when the client leaves first."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise job.gone()
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def _deltas(job: Job, engine: EngineClient) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of all sequences as they come, each with the index of its sequence."""
    return _merged(job, engine) if len(job.requests) > 1 else _indexed(job, engine, 0)


async def _merged(job: Job, engine: EngineClient) -> AsyncGenerator[tuple[int, Delta], None]:
    queue: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(maxsize=len(job.requests))
    tasks = [asyncio.create_task(_pump(job, engine, index, queue)) for index in range(len(job.requests))]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            running -= item[1].finish is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    job: Job, engine: EngineClient, index: int, queue: asyncio.Queue[tuple[int, Delta] | Exception]
) -> None:
    try:
        async with aclosing(_indexed(job, engine, index)) as source:
            async for item in source:
                await queue.put(item)
    except Exception as error:
        await queue.put(error)


async def _indexed(job: Job, engine: EngineClient, index: int) -> AsyncGenerator[tuple[int, Delta], None]:
    """One sequence up to the delta that ends it. Raises its failure, and DeadlineExceeded when time is up."""
    async with opened(engine, job.requests[index]) as source:
        while True:
            delta = await _next(source, job.deadline)
            failure = failure_of(delta)
            if failure is not None:
                raise failure
            if delta.tokens:
                job.began.set()
            yield index, delta
            if delta.finish is not None:
                return


async def _next(source: AsyncIterator[Delta], deadline: float) -> Delta:
    try:
        async with asyncio.timeout_at(deadline):
            return await anext(source)
    except TimeoutError:
        raise DeadlineExceeded("the answer took longer than its time limit; ask for fewer tokens") from None
    except StopAsyncIteration:
        raise SpecserveError("the engine's stream ended without saying why") from None


@asynccontextmanager
async def opened(engine: EngineClient, request: Request) -> AsyncIterator[AsyncIterator[Delta]]:
    """A request's deltas, from a stream that is closed on the way out."""
    source = engine.stream(request)
    try:
        yield source
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


def _chunks(
    job: Job, index: int, answer: Answer, delta: Delta, tokenizer: Tokenizer, *, first: bool
) -> list[dict[str, Any]]:
    """The chunks that one delta becomes: the opening, its text if it shows any, the reason it ended."""
    opening = out.opening_chunk(job.head, job.shape, index) if first else None
    chunks = [] if opening is None else [opening]
    piece = answer.add(delta)
    if piece.text or piece.scores or piece.calls or ((job.token_ids or job.origins) and piece.tokens):
        chunk = out.text_chunk(job.head, job.shape, index, answer, piece, tokenizer, token_ids=job.token_ids)
        chunks.append(chunk | origins_field(delta, piece.shown) if job.origins else chunk)
    if delta.finish is not None:
        chunks.append(_last(job, index, answer))
    return chunks


def _last(job: Job, index: int, answer: Answer) -> dict[str, Any]:
    chunk = out.last_chunk(job.head, job.shape, index, answer)
    single = len(job.requests) == 1 and not job.include_usage
    return chunk | out.metrics_field(job.head, [answer]) if single else chunk


def _with_usage(job: Job, chunk: dict[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
    if job.continuous_usage:
        return chunk | {"usage": out.usage(answers)}
    return chunk | {"usage": None} if job.include_usage else chunk


_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""Characters that many clients' readers of lines take for the end of one, though no server-sent event ends there."""


def event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.translate(_LINE_ENDS).encode("utf-8") + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
