"""The supervisor and the remote engine without Serve, on both transports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import ray
from cluster_facts import PROMPT, TOKENS

from specserve.cluster.placement import plan
from specserve.cluster.remote import Pipe, RemoteEngine
from specserve.cluster.supervisor import Supervisor
from specserve.config import Config
from specserve.errors import ConfigError, RequestError
from specserve.types import Health, Request, RequestId, Sampling

pytestmark = pytest.mark.ray


def with_cluster(config: Config, **changes: object) -> Config:
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})


def supervisor_of(config: Config) -> Supervisor:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Supervisor(config, plan(config, with_draft=config.draft.speculator == "small_model", nodes=nodes))


async def answers(config: Config, *requests: Request) -> list[tuple[int, ...] | RequestError]:
    """The tokens of each request, or the error that refused it, from a pipeline of its own."""
    supervisor = supervisor_of(config)
    try:
        await supervisor.start()

        async def health() -> Health:
            return supervisor.health

        pipe = Pipe(supervisor.connect_ingress, health, supervisor.metrics)
        engine = RemoteEngine(config, pipe, host=None, node_id=ray.get_runtime_context().get_node_id())
        try:
            await engine.connect()
            assert (await engine.health()).status == "ok"
            return [await answer(engine, request) for request in requests]
        finally:
            engine.close()
    finally:
        await supervisor.stop()


async def answer(engine: RemoteEngine, request: Request) -> tuple[int, ...] | RequestError:
    try:
        return tuple([token async for delta in engine.stream(request) for token in delta.tokens])
    except RequestError as error:
        return error


def greedy(name: str, prompt: Sequence[int] = PROMPT) -> Request:
    return Request(RequestId(name), tuple(prompt), TOKENS, Sampling(temperature=0.0), ignore_eos=True)


def test_ray_transport_gives_the_same_text(ray_here, config, expected):
    """By plain actor calls the greedy tokens are those of one process; a request that is too long is refused."""
    slow = with_cluster(config, transport="ray")
    first, refused = asyncio.run(answers(slow, greedy("a"), greedy("b", prompt=PROMPT * 100)))
    assert first == expected
    assert isinstance(refused, RequestError)
    assert refused.code == "context_length_exceeded"


@pytest.mark.full
def test_guesser_needs_no_draft_worker(ray_here, config, expected):
    """With a model-free speculator the same greedy tokens come from a pipeline of two processes."""
    ngram = config.model_copy(update={"draft": config.draft.model_copy(update={"speculator": "ngram"})})
    assert asyncio.run(answers(ngram, greedy("a"))) == [expected]


def test_a_model_that_is_not_there_is_a_config_error(ray_here, config, tmp_path):
    """What a worker finds wrong with its model arrives in its own words."""
    target = config.target.model_copy(update={"source": str(tmp_path / "nothing")})
    supervisor = supervisor_of(config.model_copy(update={"target": target}))

    async def start() -> None:
        try:
            await supervisor.start()
        finally:
            await supervisor.stop()

    with pytest.raises(ConfigError, match="there is no model"):
        asyncio.run(start())
