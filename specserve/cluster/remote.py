"""The engine as an ingress sees it: requests out and deltas in over one socket channel, no Ray call on the way.

When the coordinator is gone, or something was lost on the way, streams stay open: the ingress connects again and what
is missing is sent, by whichever side has it. A coordinator that is new gets every request as far as it has come.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from specserve import errors
from specserve.cluster.holds import Hold, Holder, Release
from specserve.cluster.ingress_line import Welcome
from specserve.cluster.streams import Stream, Streams, first_failure_raised
from specserve.config import Config
from specserve.errors import ChannelError, Unavailable
from specserve.metrics import Snapshot
from specserve.transport import Arrived, PeerLost
from specserve.transport.messages import Deltas, Message, Places, Reconnect
from specserve.transport.socket import Address, Endpoint, Heart, LoopMailbox, SocketChannel
from specserve.types import Delta, Health, ModelCard, Request

log = logging.getLogger(__name__)

_COORDINATOR = "coordinator"
_RETRY_S = 0.2
_ASK_TIMEOUT_S = 5.0

T = TypeVar("T")

Connect = Callable[[str, Address, int], Awaitable[Welcome]]


@dataclass(frozen=True, slots=True)
class Pipe:
    """What the engine needs of the control plane. hold and release: see `holds`; they may fail."""

    connect: Connect
    health: Callable[[], Awaitable[Health]]
    metrics: Callable[[Snapshot], Awaitable[str]]
    status: Callable[[], Awaitable[dict[str, Any]]]
    timeline: Callable[[], Awaitable[dict[str, Any]]]
    hold: Hold
    release: Release


class RemoteEngine:
    """An `EngineClient` whose engine is a coordinator in another process."""

    def __init__(
        self, config: Config, pipe: Pipe, *, host: str | None, node_id: str, holder: str | None = None
    ) -> None:
        """holder is the name of this process's actor, by which a pipeline finds out that it is dead.

        Call in a running event loop.
        """
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._heartbeat_s = config.cluster.heartbeat_s
        self._patience_s = config.engine.recovery_wait_s
        self._lasting_s = 2 * config.cluster.lost_after_s  # a way that holds for so long is one
        self._mailbox = LoopMailbox(self._loop, self._take)
        self._endpoint = Endpoint(self._mailbox, host=host, node_id=node_id, lost_after_s=config.cluster.lost_after_s)
        self._name = f"ingress-{uuid.uuid4().hex}"
        self._holder = Holder(holder or self._name, pipe.hold, pipe.release)
        self._life = -1
        self._cut: str | None = None  # why the connection of this life can bring no more
        self._channel: SocketChannel | None = None
        self._heart: Heart | None = None
        self._streams = Streams()
        self._card: ModelCard | None = None
        self._reconnect: asyncio.Task[None] | None = None
        self._given_up = False
        self._connected_s = 0.0
        self._gone_since_s: float | None = None

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
        """Introduce this ingress to the coordinator, begin to beat, and send what the coordinator does not have.

        Raises what the control plane raises, and Unavailable when the connection broke while it was made.
        """
        self._life += 1
        self._cut = None
        here = self._endpoint.accept(_COORDINATOR, self._life)
        welcome = await self._pipe.connect(self._name, here, self._streams.cursor)
        if self._cut is not None:
            raise Unavailable(self._cut)
        self._endpoint.expect(_COORDINATOR)
        self._card = welcome.card
        self._channel = self._endpoint.connect(welcome.here)
        self._connected_s = self._loop.time()
        # Before a beat tells of an old cursor.
        missing = self._streams.welcomed(welcome.engine, welcome.open, self._connected_s)
        # On the same channel: a message that was lost shows in the number of the next beat.
        self._heart = Heart(self._channel, self._heartbeat_s, lambda: (self._streams.cursor, False))
        self._given_up = False
        for message in missing:
            self._send(message)

    def _disconnect(self, reason: str) -> None:
        """Streams wait; come back as soon as there is a coordinator again."""
        self._cut = reason
        if self._channel is None:  # a connection is being made, and will find that it is cut
            return
        log.warning("connecting to the coordinator again: %s", reason)
        now_s = self._loop.time()
        if self._gone_since_s is None or now_s > self._connected_s + self._lasting_s:
            self._gone_since_s = now_s
        self._release()
        self._reconnect = asyncio.ensure_future(self._connect_again())

    async def _connect_again(self) -> None:
        # Also of connections that can be made, and break before anything comes: nobody waits for ever.
        since_s = self._loop.time() if self._gone_since_s is None else self._gone_since_s
        while True:
            if self._loop.time() > since_s + self._patience_s:
                self._given_up = True
                self._streams.fail(Unavailable(f"the engine did not come back within {self._patience_s:g} s"))
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
        self._holder.close()
        self._release()
        self._mailbox.close()
        self._endpoint.close()

    # ---- what arrives -------------------------------------------------------------------------------------------

    def _take(self, item: object) -> None:
        match item:
            case Arrived(life=life) | PeerLost(life=life) if life != self._life:
                pass  # of a connection that is over
            case PeerLost(reason=reason):
                self._disconnect(reason)
            case Arrived(message=Reconnect()):
                self._disconnect("something was lost on the way to it")
            case Arrived(message=Deltas() as message):
                self._take_deltas(message)
            case Arrived(message=Places() as message):
                self._streams.place(message)

    def _take_deltas(self, message: Deltas) -> None:
        cancels = self._streams.take(message, self._loop.time())
        if cancels is None:
            self._disconnect(f"answers are missing between {self._streams.cursor} and {message.cursor}")
            return
        self._gone_since_s = None
        for cancel in cancels:
            self._send(cancel)

    # ---- requests -----------------------------------------------------------------------------------------------

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        """See `EngineClient.stream`. Without a coordinator a request waits for one, like those that are open."""
        if request.id in self._streams:
            raise errors.InvalidField(f"a request with id {request.id!r} is already running", param="request_id")
        return first_failure_raised(self.carry(Stream(request, self._loop.time())))

    async def carry(self, stream: Stream) -> AsyncGenerator[Delta, None]:
        """The deltas of a stream, from where its client is. Never raises; the last one may have `failure` set."""
        self._streams.open(stream)
        held = self._holder.begin()
        try:
            if self._given_up:
                stream.fail(Unavailable("the engine is being restarted; try again in a few seconds"))
            elif self._channel is not None:
                self._send(stream.submission(self._loop.time(), self._streams.engine))
            while True:
                delta = await stream.unread.get()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self._holder.end(held)
            cancel = self._streams.close(stream)
            if cancel is not None:
                self._send(cancel)

    def release(self, reason: str) -> None:
        """End all streams in a failure, so that they can go on elsewhere."""
        self._streams.fail(Unavailable(reason))

    def _send(self, message: Message) -> None:
        """What cannot be sent now is made good when the coordinator is there again."""
        if self._channel is None:
            return
        try:
            self._channel.send(message)
        except ChannelError as error:
            self._disconnect(error.message)

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
