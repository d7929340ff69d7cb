"""Calls that are open while requests are: each ends with its request, whatever is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from specserve.cluster import holds
from specserve.cluster.holds import Holder, Holds
from specserve.errors import Unavailable


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(holds, "_RETRY_S", 0.02)
    monkeypatch.setattr(holds, "_GATHER_S", 0.01)


async def nobody_is_dead(prefix: str) -> bool:
    """As all are that make calls here, unless a test says otherwise."""
    del prefix
    return False


class Way:
    """The way to a pipeline: notes what passes; `broken` calls of each kind fail first."""

    def __init__(self, there: Holds, broken: int = 0) -> None:
        self.there = there
        self.broken = {"hold": broken, "release": broken}
        self.releases: list[set[str]] = []
        self.late = asyncio.Event()
        self.late.set()

    def _pass(self, kind: str) -> None:
        self.broken[kind] -= 1
        if self.broken[kind] >= 0:
            raise ConnectionError(kind)

    async def hold(self, name: str) -> None:
        self._pass("hold")
        await self.late.wait()
        await self.there.hold(name)

    async def release(self, names: Collection[str]) -> None:
        self._pass("release")
        self.releases.append(set(names))
        self.there.release(names)


async def until(there: Holds, count: int) -> None:
    async with asyncio.timeout(10):
        while len(there) != count:
            await asyncio.sleep(0.005)


def test_what_is_open_is_held_and_what_ends_is_let_go_together():
    """Sixty open, thirty end in one message, the rest in another; then nothing is left on either side."""

    async def run() -> None:
        there = Holds(nobody_is_dead)
        way = Way(there)
        holder = Holder("here", way.hold, way.release)
        names = [holder.begin() for _ in range(60)]
        await until(there, 60)
        for count, ending in ((30, names[:30]), (0, names[30:])):
            for name in ending:
                holder.end(name)
            await until(there, count)
        assert way.releases[0] == set(names[:30])
        async with asyncio.timeout(10):
            while holder._calls:
                await asyncio.sleep(0.005)
        assert len(way.releases) <= 6

    asyncio.run(run())


def test_calls_that_fail_are_made_again():
    """Three of each kind fail; then the request is held, and let go."""

    async def run() -> None:
        there = Holds(nobody_is_dead)
        way = Way(there, broken=3)
        holder = Holder("here", way.hold, way.release)
        name = holder.begin()
        await until(there, 1)
        holder.end(name)
        await until(there, 0)
        assert way.broken["release"] < 0

    asyncio.run(run())


def test_a_call_that_arrives_after_its_request_has_ended_is_let_go():
    """The first release comes too early, and is said again."""

    async def run() -> None:
        there = Holds(nobody_is_dead)
        way = Way(there)
        holder = Holder("here", way.hold, way.release)
        way.late.clear()
        name = holder.begin()
        await asyncio.sleep(0)
        holder.end(name)
        async with asyncio.timeout(10):
            while len(way.releases) < 2:
                await asyncio.sleep(0.005)
        way.late.set()
        async with asyncio.timeout(10):
            while holder._calls:
                await asyncio.sleep(0.005)
        assert len(there) == 0

    asyncio.run(run())


def test_a_call_returns_when_its_ingress_is_dead_and_not_before():
    """One that is stuck keeps its calls, however often it is looked at; one that was taken for dead renews them."""

    async def run() -> None:
        gone: set[str] = set()
        looks = 0

        async def dead(prefix: str) -> bool:
            nonlocal looks
            looks += 1
            return prefix in gone

        there = Holds(dead, look_s=0.02)
        way = Way(there)
        calls = 0

        async def hold(name: str) -> None:
            nonlocal calls
            calls += 1
            await way.hold(name)

        holder = Holder("here", hold, way.release)
        holder.begin()
        async with asyncio.timeout(10):
            while looks < 4:
                await asyncio.sleep(0.005)
            assert (calls, len(there)) == (1, 1)
            gone.add("here")
            while calls < 4:
                await asyncio.sleep(0.005)
        holder.close()
        await until(there, 0)

    asyncio.run(run())


def test_a_request_that_ends_while_the_pipeline_is_away_leaves_nothing():
    """Its call is not made again."""

    async def run() -> None:
        there = Holds(nobody_is_dead)
        way = Way(there, broken=1_000_000)
        holder = Holder("here", way.hold, way.release)
        name = holder.begin()
        await asyncio.sleep(0.05)
        holder.end(name)
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            while holder._calls:
                await asyncio.sleep(0.005)

    asyncio.run(run())


def test_who_leaves_lets_go_of_all_it_held():
    """What ended just before as well as what is open: Serve would wait for it when the pipeline leaves."""

    async def run() -> None:
        there = Holds(nobody_is_dead)
        way = Way(there)
        holder = Holder("here", way.hold, way.release)
        names = [holder.begin() for _ in range(2)]
        await until(there, 2)
        holder.end(names[0])
        holder.close()
        holder.close()
        await until(there, 0)

    asyncio.run(run())


def test_calls_that_return_at_once_leave_the_loop_to_others():
    """However often they do."""

    async def run() -> None:
        async def at_once(_: object) -> None:
            """Hold nothing."""

        holder = Holder("here", at_once, at_once)
        holder.begin()
        await asyncio.sleep(0.05)
        holder.close()
        async with asyncio.timeout(10):
            while holder._calls:
                await asyncio.sleep(0.005)

    asyncio.run(run())


def test_a_pipeline_that_stops_holds_nothing_more():
    """What is open returns, and what comes later is refused, so that nobody asks in a loop without a pause."""

    async def run() -> None:
        there = Holds(nobody_is_dead)
        way = Way(there)
        holder = Holder("here", way.hold, way.release)
        holder.begin()
        await until(there, 1)
        there.close()
        await until(there, 0)
        with pytest.raises(Unavailable):
            await there.hold("late")
        holder.close()

    asyncio.run(run())
