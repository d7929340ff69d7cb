"""Pipelines on the local Ray of the tests that share one draft worker, without Serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from bare_pipeline import connected
from cluster_facts import TOKENS

from specserve.cluster.draft_keeper import DraftKeeper
from specserve.cluster.leased_draft import LeasedDraft
from specserve.cluster.placement import plan_shared
from specserve.cluster.remote import RemoteEngine
from specserve.cluster.supervisor import Supervisor
from specserve.config import Config
from specserve.types import Request, RequestStats


class KeepersHere:
    """Keepers that are objects of this process."""

    def __init__(self, keepers: dict[str, DraftKeeper]) -> None:
        self.keepers = keepers

    async def names(self) -> Sequence[str]:
        return tuple(self.keepers)

    async def ask(self, name: str, method: str, *arguments: object, timeout_s: float) -> Any:
        return await asyncio.wait_for(getattr(self.keepers[name], method)(*arguments), timeout_s)


@dataclass
class Served:
    """One of the pipelines, watched, and an engine that is connected to it."""

    supervisor: Supervisor
    engine: RemoteEngine

    async def healthy(self) -> None:
        async with asyncio.timeout(240):
            while (await self.engine.health()).status != "ok":
                await asyncio.sleep(0.1)


def shared(config: Config, **engine: object) -> Config:
    """Two pipelines with one draft worker."""
    cluster = config.cluster.model_copy(update={"pipelines": 2, "pipelines_per_draft": 2})
    changed = config.engine.model_copy(update=engine)
    return config.model_copy(update={"cluster": cluster, "engine": changed})


@contextlib.asynccontextmanager
async def two_served(config: Config) -> AsyncIterator[tuple[DraftKeeper, list[Served]]]:
    """Two pipelines and the keeper of the draft worker that they share."""
    keeper = DraftKeeper(config.model_dump())
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(keeper.stop)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        placement = plan_shared(config, nodes)[0]
        drafts = [LeasedDraft(config, KeepersHere({"one": keeper})) for _ in range(2)]
        supervisors = [Supervisor(config, placement, draft) for draft in drafts]
        for supervisor in supervisors:
            stack.push_async_callback(supervisor.stop)
        await asyncio.gather(*(supervisor.start() for supervisor in supervisors))
        served = [
            Served(supervisor, await stack.enter_async_context(connected(config, supervisor)))
            for supervisor in supervisors
        ]
        yield keeper, served


@dataclass
class Answer:
    """The tokens of a stream, and what the engine says of it."""

    tokens: tuple[int, ...]
    stats: RequestStats


async def streamed(engine: RemoteEngine, request: Request, begun: asyncio.Event | None = None) -> Answer:
    """The whole answer; the event is set with its first tokens."""
    tokens: list[int] = []
    async for delta in engine.stream(request):
        tokens += delta.tokens
        if delta.tokens and begun is not None:
            begun.set()
    assert delta.failure is None
    assert delta.stats is not None
    return Answer(tuple(tokens), delta.stats)


async def under_streams(served: Sequence[Served], requests: Sequence[Request], disturb: Any) -> list[Answer]:
    """A stream on each pipeline; what is to happen happens when both have begun and neither has ended."""
    begun = [asyncio.Event() for _ in served]
    streams = [
        asyncio.ensure_future(streamed(each.engine, request, event))
        for each, request, event in zip(served, requests, begun, strict=True)
    ]
    for event in begun:
        await asyncio.wait_for(event.wait(), 120)
    assert not any(stream.done() for stream in streams), "too late to disturb"
    await disturb()
    return list(await asyncio.gather(*streams))


def drafted(answer: Answer) -> bool:
    """Whether most of the answer came from drafts, as it does where they are there all the time."""
    return answer.stats.kept_tokens > TOKENS / 2
