"""One engine made of many: an ingress's channels to all pipelines, and the choice among them for each request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from specserve.cluster.routing import Router
from specserve.cluster.streams import Stream, first_failure_raised
from specserve.errors import InvalidField, Overloaded, Unavailable
from specserve.metrics import Snapshot
from specserve.types import Delta, EngineClient, Failure, Health, ModelCard, Request

_LOOK_S = 0.1
_ASK_S = 0.5
_ASK_ONE_S = 2.0  # where there is one pipeline only: nothing is chosen by load
_RETRY_S = 0.5
_LONGEST_MEETING_S = 5.0  # from when Serve names a pipeline until it is connected, where no other takes requests
_LONGEST_AWAY_S = 2.0  # of a pipeline, on top of the time that it took to miss it; a lost message costs far less

_STARTING = Health("starting", "connecting")
_RANKS = ("ok", "degraded", "draining", "starting", "dead")


class PipelineEngine(EngineClient, Protocol):
    """The channel to one pipeline, as `RemoteEngine` is one."""

    @property
    def connected(self) -> bool:
        """Whether requests can be sent now."""
        ...

    async def connect(self) -> None:
        """Open the channel. Raises where the pipeline does not answer; after it, losses are made good by itself."""
        ...

    def carry(self, stream: Stream) -> AsyncGenerator[Delta, None]:
        """The deltas of a stream, from where its client is. Never raises; the last one may have `failure` set."""
        ...

    def release(self, reason: str) -> None:
        """End all streams in a failure, so that they can go on elsewhere."""
        ...

    def close(self) -> None:
        """Leave. Idempotent."""
        ...


@dataclass(slots=True)
class _Member:
    """One pipeline. `open` are this ingress's own streams there, `others` those of other ingresses, as last heard."""

    engine: PipelineEngine
    open: int = 0
    others: int = 0
    met: bool = False
    leaving: bool = False
    away_since_s: float | None = None
    health: Health = _STARTING
    task: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Sequences there."""
        return self.open + self.others

    @property
    def takes(self) -> bool:
        """Whether it may be given requests."""
        return not self.leaving and self.engine.connected

    def close(self) -> None:
        """Give the channel up."""
        if self.task is not None:
            self.task.cancel()
        self.engine.close()


class RoutingEngine:
    """An `EngineClient` in front of all pipelines whose names `names` gives; `join` makes the channel to one.

    A pipeline whose name is gone takes no new request, and its channel is closed when its last stream here has ended.
    A request that a pipeline refuses, for being full or not there, is offered to each of the others. A stream that a
    pipeline cannot end, because it is lost or says so, goes on in another one from where its client is.
    """

    def __init__(
        self, router: Router, names: Callable[[], Collection[str]], join: Callable[[str], PipelineEngine]
    ) -> None:
        self._router = router
        self._names = names
        self._join = join
        self._members: dict[str, _Member] = {}
        self._requests: set[str] = set()
        self._card: ModelCard | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Follow the pipelines as they come and go; returns when the first one is connected."""
        self._watching = asyncio.ensure_future(self._watch())
        while not any(member.takes for member in self._members.values()):
            if self._watching.done():
                self._watching.result()
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """Leave all pipelines. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
        for member in self._members.values():
            member.close()
        self._members.clear()

    # ---- pipelines ----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            self._follow(set(self._names()))
            self._release_lost(asyncio.get_running_loop().time())
            await asyncio.sleep(_LOOK_S)

    def _follow(self, names: set[str]) -> None:
        for name in names - self._members.keys():
            member = self._members[name] = _Member(self._join(name))
            member.task = asyncio.ensure_future(self._keep(member))
        for name, member in list(self._members.items()):
            member.leaving = name not in names
            if member.leaving and not member.open:
                member.close()
                del self._members[name]
                self._router.forget(name)

    def _release_lost(self, now_s: float) -> None:
        """What a pipeline held that is gone, or away for long, goes on in another one, if there is one."""
        for name, member in self._members.items():
            if member.engine.connected:
                member.away_since_s = None
                continue
            member.away_since_s = now_s if member.away_since_s is None else member.away_since_s
            lost = member.leaving or now_s - member.away_since_s > _LONGEST_AWAY_S
            if lost and member.open and self._loads({name}):
                member.engine.release("the pipeline is lost, and there is no other")

    async def _keep(self, member: _Member) -> None:
        """Connect, then ask how much other ingresses send there."""
        await self._connect(member)
        while True:
            health = await member.engine.health()
            member.others = max(0, health.running + health.waiting - member.open)
            member.health = health
            await asyncio.sleep(_ASK_S if len(self._members) > 1 else _ASK_ONE_S)

    async def _connect(self, member: _Member) -> None:
        while True:
            try:
                await member.engine.connect()
                member.met = True
                self._card = self._card or member.engine.card
                return
            except Exception as error:  # whatever the control plane says, a later try may succeed
                member.health = Health("starting", str(error))
                await asyncio.sleep(_RETRY_S)

    # ---- requests -----------------------------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        """The served model."""
        if self._card is None:
            raise Unavailable("the engine is starting")
        return self._card

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """See `EngineClient.stream`."""
        if request.id in self._requests:
            raise InvalidField(f"a request with id {request.id!r} is already running", param="request_id")
        self._requests.add(request.id)
        try:
            async with contextlib.aclosing(first_failure_raised(self._carried(request))) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._requests.discard(request.id)

    async def _carried(self, request: Request) -> AsyncGenerator[Delta, None]:
        """By one pipeline after another, until the stream has ended for its client."""
        stream = Stream(request, asyncio.get_running_loop().time())
        refused: set[str] = set()
        name = await self._route(request, refused)
        while not stream.ended:
            async with contextlib.aclosing(self._carried_by(self._members[name], stream)) as deltas:
                async for delta in deltas:
                    if delta.failure is None or not self._goes_on(stream, delta.failure, name, refused):
                        yield delta
            if not stream.ended:
                name = await self._route(request, refused | {name})

    def _goes_on(self, stream: Stream, failure: Failure, name: str, refused: set[str]) -> bool:
        """Whether a stream that ended like this goes on in another pipeline. What refused it is not asked again."""
        if stream.refused:
            refused.add(name)
        others = {Overloaded.status: self._loads, Unavailable.status: self._coming}.get(failure.status)
        if others is None or not stream.lost() or not others(refused | {name}):
            return False
        stream.go_on()
        return True

    async def _carried_by(self, member: _Member, stream: Stream) -> AsyncGenerator[Delta, None]:
        member.open += 1
        try:
            async with contextlib.aclosing(member.engine.carry(stream)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            member.open -= 1

    async def _route(self, request: Request, refused: Collection[str]) -> str:
        """Waits for a pipeline that is on its way here: in an update the old ones may leave before the new are met."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _LONGEST_MEETING_S
        while not (loads := self._loads(refused) or self._awaited(refused)):
            if not self._coming(refused) or loop.time() > end_s:
                raise Unavailable("no pipeline can take requests now; try again in a few seconds")
            await asyncio.sleep(_LOOK_S)
        return self._router.route(request.prompt, loads)

    def _loads(self, refused: Collection[str]) -> dict[str, int]:
        return {name: one.load for name, one in self._members.items() if one.takes and name not in refused}

    def _coming(self, refused: Collection[str]) -> set[str]:
        """Pipelines that take requests, now or once they are met."""
        return {name for name, one in self._members.items() if not one.leaving and name not in refused}

    def _awaited(self, refused: Collection[str]) -> dict[str, int]:
        """Pipelines that are away and come back: without any other, requests wait for their coordinators."""
        there = ((name, one) for name, one in self._members.items() if one.met and not one.leaving)
        return {name: one.load for name, one in there if name not in refused}

    # ---- what operators ask -------------------------------------------------------------------------------------

    async def health(self) -> Health:
        """See `EngineClient.health`. As good as the best pipeline; the sequences of all."""
        there = [member for member in self._members.values() if not member.leaving]
        found = await asyncio.gather(*(member.engine.health() for member in there))
        if not found:
            return Health("starting", "there is no pipeline yet")
        best = min(found, key=lambda health: _RANKS.index(health.status))
        serving = sum(health.status in ("ok", "degraded") for health in found)
        missing = "" if serving == len(found) or len(found) == 1 else f"{serving} of {len(found)} pipelines serve"
        detail = "; ".join(part for part in (best.detail, missing) if part)
        running, waiting = sum(health.running for health in found), sum(health.waiting for health in found)
        return Health(best.status, detail, running, waiting)

    async def metrics(self, own: Snapshot) -> str:
        """See `EngineClient.metrics`: those of all pipelines, through any."""
        return await self._any().metrics(own)

    async def status(self) -> dict[str, Any]:
        """See `EngineClient.status`: one pipeline in full, all of them in `pipelines`, and what routing came to."""
        members = {name: (one.health.status, one.load) for name, one in self._members.items()}
        listed = [{"name": name, "status": status, "load": load} for name, (status, load) in sorted(members.items())]
        routed = {"blocks": self._router.blocks, "matched_blocks": self._router.matched_blocks}
        return await self._any().status() | {"pipelines": listed, "routing": routed}

    async def timeline(self) -> dict[str, Any]:
        """See `EngineClient.timeline`; of one pipeline."""
        return await self._any().timeline()

    def _any(self) -> PipelineEngine:
        """The first pipeline that takes requests, or the first one."""
        if not self._members:
            raise Unavailable("there is no pipeline yet")
        name = min(self._members, key=lambda name: (not self._members[name].takes, name))
        return self._members[name].engine
