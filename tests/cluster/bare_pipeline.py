"""A pipeline on the local Ray of the tests without Serve: its processes, and an engine that is connected to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import ray
from cluster_facts import PROMPT, TOKENS

from specserve import drafting
from specserve.cluster.placement import plan
from specserve.cluster.remote import Pipe, RemoteEngine
from specserve.cluster.supervisor import Supervisor
from specserve.config import Config
from specserve.errors import RequestError
from specserve.metrics import Snapshot
from specserve.types import Health, Request, RequestId, Sampling


def supervisor_of(config: Config) -> Supervisor:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Supervisor(config, plan(config, with_draft=drafting.has_worker(config.draft), nodes=nodes))


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[Supervisor, RemoteEngine]]:
    """A pipeline of its own, watched, and an engine that is connected to it."""
    supervisor = supervisor_of(config)
    try:
        await supervisor.start()
        async with connected(config, supervisor) as engine:
            yield supervisor, engine
    finally:
        await supervisor.stop()


@contextlib.asynccontextmanager
async def connected(config: Config, supervisor: Supervisor) -> AsyncIterator[RemoteEngine]:
    """Watch a pipeline that has started; an engine that is connected to it."""
    watching = asyncio.create_task(supervisor.watch())

    async def health() -> Health:
        return supervisor.health

    async def metrics(own: Snapshot) -> str:
        del own
        return str(await supervisor.metrics())

    async def unseen(names: object) -> None:
        """No Serve is there to see which requests are open."""

    rest = (supervisor.status, supervisor.timeline, unseen, unseen)
    pipe = Pipe(supervisor.connect_ingress, health, metrics, *rest)
    engine = RemoteEngine(config, pipe, host=None, node_id=ray.get_runtime_context().get_node_id())
    try:
        await engine.connect()
        yield engine
    finally:
        engine.close()
        watching.cancel()


async def answers(config: Config, *requests: Request) -> list[tuple[int, ...] | RequestError]:
    """The tokens of each request, or the error that refused it, from a pipeline of its own."""
    async with serving(config) as (_, engine):
        assert (await engine.health()).status == "ok"
        return [await answer(engine, request) for request in requests]


async def answer(engine: RemoteEngine, request: Request) -> tuple[int, ...] | RequestError:
    try:
        return tuple([token async for delta in engine.stream(request) for token in delta.tokens])
    except RequestError as error:
        return error


def greedy(name: str, prompt: Sequence[int] = PROMPT) -> Request:
    return Request(RequestId(name), tuple(prompt), TOKENS, Sampling(temperature=0.0), ignore_eos=True)
