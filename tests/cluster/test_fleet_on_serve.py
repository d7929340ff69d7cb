"""Calls of replicas by name through Serve's own router: many at once, out of one request, and to who is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import copy_context
from threading import Event
from typing import Any, TypeVar

import pytest

from specserve.cluster.fleet import Fleet
from specserve.cluster.holds import Holds
from specserve.cluster.launch import deployed, with_port
from specserve.cluster.local_ray import free_port
from specserve.config import parse
from specserve.errors import ConfigError, Unavailable

pytestmark = pytest.mark.ray

OPEN = 300
T = TypeVar("T")


@pytest.fixture(scope="module")
def handle(ray_here) -> Any:
    """A handle to one replica."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from specserve.cluster.by_name import ByName

    class Pipeline:  # in here, because no other process can import this file
        """What a pipeline has for those that hold calls open."""

        def __init__(self) -> None:
            self.holds = Holds(self.dead)

        async def dead(self, prefix: str) -> bool:
            return False

        async def hold(self, name: str) -> None:
            await self.holds.hold(name)

        async def release(self, names: list[str]) -> None:
            self.holds.release(names)

        async def held(self) -> int:
            return len(self.holds)

    deployment = serve.deployment(
        Pipeline,
        name="Held",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1_000_000,
        request_router_config=RequestRouterConfig(request_router_class=ByName),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": free_port("127.0.0.1")})
    yield serve.run(deployment.bind(), name="held", route_prefix=None)
    serve.shutdown()


def test_a_serve_that_runs_already_is_not_taken_over(handle) -> None:
    """It would go on listening where it was told to before, so that nobody could reach what is deployed."""
    config = parse({"server": {"port": 0}})
    with pytest.raises(ConfigError, match="serve shutdown"), deployed(with_port(config), Event()):
        pass


async def answered(response: Awaitable[T]) -> T:
    """The answer of a call that nothing holds up; the bound only says that it never comes."""
    return await asyncio.wait_for(response, 20)


async def held_by(calls: Any, count: int) -> None:
    """Wait until the replica holds so many."""
    while await answered(calls.held.remote()) != count:
        await asyncio.sleep(0.05)


async def held_from_one_request(handle: Any, calls: Any, count: int) -> list[asyncio.Task[None]]:
    """So many calls of `hold`, as if they all were made while one HTTP request is served."""
    from ray.serve.context import _RequestContext, _serve_request_context

    async def hold(name: str) -> None:
        await calls.hold.remote(name)

    context = copy_context()
    context.run(_serve_request_context.set, _RequestContext(_internal_request_id="one request"))
    return [asyncio.create_task(hold(str(number)), context=context.copy()) for number in range(count)]


def test_three_hundred_open_calls_of_one_request_hold_nobody_up(handle):
    """All of them arrive, other calls are answered meanwhile, and all end when they are let go."""

    async def run() -> None:
        calls = Fleet(handle).any()
        tasks = await held_from_one_request(handle, calls, OPEN)
        await asyncio.wait_for(held_by(calls, OPEN), 60)
        await answered(calls.release.remote([str(number) for number in range(OPEN)]))
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert await answered(calls.held.remote()) == 0

    asyncio.run(run())


@pytest.mark.full
def test_without_the_fleet_two_calls_of_one_request_hold_up_all_others(handle):
    """Why `Calls` are made apart. When Ray mends this, the test fails, and `Calls` can go."""

    async def run() -> None:
        tasks = await held_from_one_request(handle, handle, 6)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(held_by(handle, 6), 3)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.wait_for(held_by(handle, 0), 20)

    asyncio.run(run())


def test_calls_to_who_is_gone_fail_at_once_and_leave_nothing_in_the_router(handle):
    """A hundred of them, after which the router has forgotten them all and still routes."""

    async def run() -> None:
        gone = Fleet(handle).at("nobody")
        for _ in range(100):
            with pytest.raises(Unavailable, match="replica nobody is gone"):
                await answered(gone.held.remote())
        assert await answered(Fleet(handle).any().held.remote()) == 0

    asyncio.run(run())
    router = handle._router._asyncio_router.request_router
    assert not router._pending_requests_by_id
