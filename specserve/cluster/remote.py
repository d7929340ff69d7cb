"""The engine as an ingress sees it: requests out and deltas in over one socket channel, no Ray call on the way.

A gap in the numbered batches, or a coordinator that is gone, ends every open stream with a failure; then the ingress
connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from specserve import errors
from specserve.config import Config
from specserve.errors import ChannelError, SpecserveError, Unavailable
from specserve.metrics import Snapshot
from specserve.transport import Arrived, Mailbox, PeerLost
from specserve.transport.messages import Cancel, Deltas, Submit
from specserve.transport.socket import Address, Endpoint, Heart, SocketChannel
from specserve.types import Delta, Failure, Health, ModelCard, Request, RequestId

log = logging.getLogger(__name__)

_COORDINATOR = "coordinator"
_RETRY_S = 0.5
_ASK_TIMEOUT_S = 5.0

T = TypeVar("T")

Connect = Callable[[str, Address], Awaitable[tuple[Address, ModelCard]]]


@dataclass(frozen=True, slots=True)
class Pipe:
    """What the engine needs of the control plane."""

    connect: Connect
    health: Callable[[], Awaitable[Health]]
    metrics: Callable[[Snapshot], Awaitable[str]]
    status: Callable[[], Awaitable[dict[str, Any]]]
    timeline: Callable[[], Awaitable[dict[str, Any]]]


class _LoopMailbox(Mailbox):
    """Hands every item to a function on an asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[object], None]) -> None:
        super().__init__()
        self._loop = loop
        self._take = take

    def put(self, item: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._take, item)


class RemoteEngine:
    """An `EngineClient` whose engine is a coordinator in another process."""

    def __init__(self, config: Config, pipe: Pipe, *, host: str | None, node_id: str) -> None:
        """Call in a running event loop."""
        self._pipe = pipe
        self._heartbeat_s = config.cluster.heartbeat_s
        self._mailbox = _LoopMailbox(asyncio.get_running_loop(), self._take)
        lost_after_s = config.cluster.lost_after_s
        self._endpoint = Endpoint(self._mailbox, host=host, node_id=node_id, lost_after_s=lost_after_s)
        self._life = -1
        self._cursor = 0
        self._channel: SocketChannel | None = None
        self._heart: Heart | None = None
        self._streams: dict[str, asyncio.Queue[Delta]] = {}
        self._card: ModelCard | None = None
        self._reconnect: asyncio.Task[None] | None = None

    @property
    def card(self) -> ModelCard:
        """The served model."""
        if self._card is None:
            raise Unavailable("the engine is starting")
        return self._card

    @property
    def connected(self) -> bool:
        """Whether requests can be sent now."""
        return self._channel is not None

    # ---- connection ---------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Introduce this ingress to the coordinator, under a new name, and begin to beat."""
        self._life += 1
        self._cursor = 0
        here = self._endpoint.accept(_COORDINATOR, self._life)
        there, self._card = await self._pipe.connect(f"ingress-{uuid.uuid4().hex}", here)
        self._endpoint.expect(_COORDINATOR)
        self._channel = self._endpoint.connect(there)
        self._heart = Heart(self._endpoint.connect(there), self._heartbeat_s, lambda: (0, False))

    def _disconnect(self, reason: str) -> None:
        """End all streams; come back as soon as there is a coordinator again."""
        if self._channel is None:
            return
        log.warning("the coordinator is gone: %s", reason)
        self._release()
        failure = Failure(Unavailable.status, Unavailable.code, f"the engine was interrupted: {reason}")
        for request_id, queue in self._streams.items():
            queue.put_nowait(Delta(RequestId(request_id), (), finish="error", failure=failure))
        self._reconnect = asyncio.ensure_future(self._connect_again())

    async def _connect_again(self) -> None:
        while True:
            try:
                await self.connect()
                return
            except Exception as error:  # whatever the control plane says, a later try may succeed
                log.info("no coordinator yet: %s", error)
                await asyncio.sleep(_RETRY_S)

    def _release(self) -> None:
        if self._heart is not None:
            self._heart.close()
        if self._channel is not None:
            self._channel.close()
        self._heart = self._channel = None

    def close(self) -> None:
        """Leave. Idempotent."""
        if self._reconnect is not None:
            self._reconnect.cancel()
        self._release()
        self._endpoint.close()

    # ---- what arrives -------------------------------------------------------------------------------------------

    def _take(self, item: object) -> None:
        if isinstance(item, PeerLost) and item.life == self._life:
            self._disconnect(item.reason)
        elif isinstance(item, Arrived) and item.life == self._life and isinstance(item.message, Deltas):
            self._take_deltas(item.message)

    def _take_deltas(self, message: Deltas) -> None:
        self._cursor += 1
        if message.cursor != self._cursor:
            self._disconnect(f"expected batch {self._cursor} of answers, got {message.cursor}")
            return
        for delta in message.deltas:
            queue = self._streams.get(delta.request)
            if queue is not None:
                queue.put_nowait(delta)

    # ---- requests -----------------------------------------------------------------------------------------------

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """See `EngineClient.stream`."""
        if request.id in self._streams:
            raise errors.InvalidField(f"a request with id {request.id!r} is already running", param="request_id")
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._streams[request.id] = queue
        finished = False
        try:
            self._send(Submit(request))
            delta = await queue.get()
            if delta.failure is not None and not delta.tokens:
                finished = True
                raise error_of(delta.failure)
            while True:
                finished = delta.finish is not None
                yield delta
                if finished:
                    return
                delta = await queue.get()
        finally:
            del self._streams[request.id]
            if not finished:
                with contextlib.suppress(SpecserveError):
                    self._send(Cancel(request.id))

    def _send(self, message: Submit | Cancel) -> None:
        if self._channel is None:
            raise Unavailable("the engine is being restarted; try again in a few seconds")
        try:
            self._channel.send(message)
        except ChannelError as error:
            raise Unavailable(error.message) from None

    async def health(self) -> Health:
        """See `EngineClient.health`."""
        try:
            health = await asyncio.wait_for(self._pipe.health(), _ASK_TIMEOUT_S)
        except Exception as error:  # health never raises
            return Health("dead", f"the pipeline does not answer: {type(error).__name__}")
        if self._channel is None and health.status in ("ok", "degraded"):
            return Health("starting", "connecting to the coordinator")
        return health

    async def metrics(self, own: Snapshot) -> str:
        """See `EngineClient.metrics`. Raises Unavailable when the pipeline does not answer."""
        return await _asked("metrics", self._pipe.metrics(own))

    async def status(self) -> dict[str, Any]:
        """See `EngineClient.status`."""
        return await _asked("status", self._pipe.status())

    async def timeline(self) -> dict[str, Any]:
        """See `EngineClient.timeline`."""
        return await _asked("timeline", self._pipe.timeline())


async def _asked(what: str, answer: Awaitable[T]) -> T:
    """What the control plane says. Raises Unavailable when it says nothing."""
    try:
        return await asyncio.wait_for(answer, _ASK_TIMEOUT_S)
    except Exception as error:
        raise Unavailable(f"no {what} now: {type(error).__name__}") from None


def error_of(failure: Failure) -> SpecserveError:
    """The exception that a failure once was."""
    kinds = [SpecserveError]
    while kinds:
        kind = kinds.pop()
        if kind.code == failure.code:
            return kind(failure.message)
        kinds.extend(kind.__subclasses__())
    error = SpecserveError(failure.message)
    error.status, error.code = failure.status, failure.code
    return error
