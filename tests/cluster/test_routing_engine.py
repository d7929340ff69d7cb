"""One engine made of several: who gets a request, what happens when they come, refuse, fail and go."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specserve.cluster.routing import Router
from specserve.cluster.routing_engine import RoutingEngine
from specserve.cluster.streams import MOST_LOSSES, Stream
from specserve.errors import InvalidField, Overloaded, SpecserveError, Unavailable, VerifierLost
from specserve.types import Delta, Failure, Health, Request, RequestId

sys.path.insert(0, str(Path(__file__).parents[1] / "api"))

from scripted_engine import NOBODY, ScriptedEngine, Step, stats


class Pipeline(ScriptedEngine):
    """A scripted pipeline that can be away."""

    def __init__(self, script: Sequence[Step], *, connects: bool = True) -> None:
        super().__init__(script)
        self.state = Health("ok")
        self.connected = False
        self.gave_up = False
        self.streams: list[Stream] = []
        self._connects = connects

    async def connect(self) -> None:
        """Fails where the script says so."""
        if not self._connects:
            raise Unavailable("not there")
        self.connected = True

    def reachable(self) -> None:
        """From now on connecting succeeds."""
        self._connects = True

    async def carry(self, stream: Stream) -> AsyncGenerator[Delta, None]:
        """The script, as a coordinator would play it to this stream: what it raises refuses the request."""
        self.streams.append(stream)
        script = self.stream(stream.submission(0.0, repr(self)).request)
        playing = asyncio.ensure_future(self._play(script, stream))
        try:
            while True:
                delta = await stream.unread.get()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self.streams.remove(stream)
            playing.cancel()
            await asyncio.wait([playing])
            await script.aclose()  # type: ignore[attr-defined]

    async def _play(self, script: AsyncGenerator[Delta, None], stream: Stream) -> None:
        try:
            async for delta in script:
                stream.take(delta, 0.0)
        except SpecserveError as error:
            failure = Failure.of(error)
            stream.take(Delta(NOBODY, (), finish="error", failure=failure), 0.0)

    def release(self, reason: str) -> None:
        """As the real one."""
        for stream in self.streams:
            stream.fail(Unavailable(reason))

    def close(self) -> None:
        """Remember it."""
        self.gave_up = True
        self.connected = False


def answer(*tokens: int) -> list[Step]:
    return [Delta(NOBODY, tokens), Delta(NOBODY, (), finish="length")]


def paused(event: asyncio.Event, *tokens: int) -> list[Step]:
    async def wait() -> None:
        await event.wait()

    return [Delta(NOBODY, tokens), wait, Delta(NOBODY, (9,), finish="length")]


def request(name: str) -> Request:
    return Request(RequestId(name), tuple(range(32)), 4)


async def tokens(engine: RoutingEngine, name: str) -> tuple[int, ...]:
    return await _collected(engine.stream(request(name)))


def running(pipelines: dict[str, Pipeline], test: Callable[[RoutingEngine, set[str]], Awaitable[None]]) -> None:
    """Run a test on an engine over these pipelines, whose names the test may change."""

    async def run() -> None:
        names = set(pipelines)
        router = Router("least_loaded", block_tokens=16, slack=4)
        engine = RoutingEngine(router, lambda: names, lambda name: pipelines[name])
        try:
            async with asyncio.timeout(20):
                await engine.start()
                await test(engine, names)
        finally:
            engine.close()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_requests_are_spread_by_what_is_open():
    """Eight open streams on two pipelines: four each."""
    event = asyncio.Event()
    pipelines = {name: Pipeline(paused(event, 1)) for name in "ab"}

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        await until(lambda: all(one.connected for one in pipelines.values()))
        streams = [asyncio.ensure_future(tokens(engine, str(number))) for number in range(8)]
        await until(lambda: sum(len(one.requests) for one in pipelines.values()) == 8)
        assert [len(one.requests) for one in pipelines.values()] == [4, 4]
        event.set()
        assert await asyncio.gather(*streams) == [(1, 9)] * 8

    running(pipelines, test)


@pytest.mark.parametrize("error", [Unavailable("draining"), Overloaded("full")])
def test_a_refused_request_is_offered_to_the_others(error):
    """One refuses, the other answers; when all refuse, the last refusal is the client's."""
    pipelines = {"a": Pipeline([error]), "b": Pipeline([error]), "c": Pipeline(answer(7))}

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        await until(lambda: all(one.connected for one in pipelines.values()))
        assert [await tokens(engine, str(number)) for number in range(6)] == [(7,)] * 6
        names.discard("c")
        await until(lambda: pipelines["c"].gave_up)
        with pytest.raises(type(error)):
            await tokens(engine, "last")
        assert {one.requests[-1].id for one in (pipelines["a"], pipelines["b"])} == {"last"}

    running(pipelines, test)


def counting(upto: int, then: Step) -> Callable[[Request], list[Step]]:
    """An answer that counts on from what its client has, and ends like this."""

    def script(asked: Request) -> list[Step]:
        return [Delta(NOBODY, (number,)) for number in range(len(asked.answer), upto)] + [then]

    return script


FAILED = Delta(NOBODY, (), finish="error", failure=Failure(503, "verifier_lost", "gone"), stats=stats(2))
ENDED = Delta(NOBODY, (), finish="length", stats=stats(4))


def test_a_begun_answer_goes_on_where_its_client_is():
    """A pipeline gives it up after two tokens: another one is sent these, and adds the others."""
    pipelines = {"a": Pipeline(counting(2, FAILED)), "b": Pipeline(counting(4, ENDED))}

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        await until(lambda: all(one.connected for one in pipelines.values()))
        assert [await tokens(engine, str(number)) for number in range(4)] == [(0, 1, 2, 3)] * 4
        assert len(pipelines["a"].requests) > 0
        assert sum(asked.answer == (0, 1) for asked in pipelines["b"].requests) == len(pipelines["a"].requests)
        names.discard("b")
        await until(lambda: pipelines["b"].gave_up)
        last = [delta async for delta in engine.stream(request("x"))][-1]
        assert last.failure == FAILED.failure

    running(pipelines, test)


@pytest.mark.parametrize("failure", [Failure(500, "internal_error", "a bug"), Failure(408, "client_too_slow", "slow")])
def test_what_would_fail_elsewhere_too_is_not_tried_there(failure):
    """Only what a pipeline lacks is to be had elsewhere."""
    pipelines = {name: Pipeline(counting(2, replace(FAILED, failure=failure))) for name in "ab"}

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        await until(lambda: all(one.connected for one in pipelines.values()))
        found = [delta async for delta in engine.stream(request("x"))]
        assert found[-1].failure == failure
        assert sum(len(one.requests) for one in pipelines.values()) == 1

    running(pipelines, test)


def test_a_request_that_ends_its_pipelines_is_given_up():
    """Three were lost without a token of it: the others are spared."""
    pipelines = {name: Pipeline(counting(0, FAILED)) for name in "abcde"}

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        await until(lambda: all(one.connected for one in pipelines.values()))
        with pytest.raises(VerifierLost):
            await tokens(engine, "x")
        assert sum(len(one.requests) for one in pipelines.values()) == MOST_LOSSES

    running(pipelines, test)


@pytest.mark.parametrize("leaving", [False, True])
def test_streams_of_a_lost_pipeline_go_on_in_another(leaving, monkeypatch):
    """One that is away too long, or gone and cut off. Where there is no other, they wait for it."""
    monkeypatch.setattr("specserve.cluster.routing_engine._LONGEST_AWAY_S", 1e9 if leaving else 0.2)
    pipelines = {"a": Pipeline(paused(asyncio.Event(), 0, 1)), "b": Pipeline(counting(4, ENDED), connects=False)}

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        stream = engine.stream(request("x"))
        assert (await anext(stream)).tokens == (0, 1)
        pipelines["a"].connected = False
        names -= {"a"} if leaving else set()
        rest = asyncio.ensure_future(_collected(stream))
        await asyncio.sleep(0.6)
        assert not rest.done()
        pipelines["b"].connected = True
        assert await rest == (2, 3)
        assert pipelines["a"].closed == ["x"]

    running(pipelines, test)


async def _collected(stream: AsyncIterator[Delta]) -> tuple[int, ...]:
    return tuple([token async for delta in stream for token in delta.tokens])


def test_a_pipeline_that_leaves_ends_its_streams_first():
    """It takes nothing new, its open stream goes on to the end, and only then its channel is closed."""
    event = asyncio.Event()
    pipelines = {"a": Pipeline(paused(event, 1)), "b": Pipeline(answer(2))}

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        names.discard("b")
        await until(lambda: pipelines["b"].gave_up or not pipelines["b"].connected)
        stream = asyncio.ensure_future(tokens(engine, "long"))
        await until(lambda: len(pipelines["a"].requests) == 1)
        pipelines["b"] = Pipeline(answer(2))
        names.add("b")
        names.discard("a")
        await until(lambda: pipelines["b"].connected)
        await asyncio.sleep(0.3)
        assert [await tokens(engine, str(number)) for number in range(4)] == [(2,)] * 4
        assert not pipelines["a"].gave_up
        event.set()
        assert await stream == (1, 9)
        await until(lambda: pipelines["a"].gave_up)

    running(pipelines, test)


def test_one_that_cannot_be_reached_harms_nobody():
    """Requests go to the other; health says how many serve; one that was there and is away is waited for."""
    pipelines = {"a": Pipeline(answer(1)), "b": Pipeline(answer(2), connects=False)}
    pipelines["b"].state = Health("starting")

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        await until(lambda: pipelines["a"].connected)
        assert [await tokens(engine, str(number)) for number in range(3)] == [(1,)] * 3
        health = await engine.health()
        assert (health.status, health.detail) == ("ok", "1 of 2 pipelines serve")
        pipelines["a"].connected = False
        assert await tokens(engine, "x") == (1,)
        names.discard("a")
        await until(lambda: pipelines["a"].gave_up)
        with pytest.raises(Unavailable, match="no pipeline"):
            await tokens(engine, "x")

    running(pipelines, test)


def test_a_request_between_two_pipelines_waits_for_the_new_one():
    """In an update the old one may refuse, or be gone, before the new one is met."""
    pipelines = {"old": Pipeline([Unavailable("draining")])}

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        await until(lambda: pipelines["old"].connected)
        pipelines["new"] = Pipeline(answer(3), connects=False)
        names.add("new")
        await until(lambda: "new" in engine._members)
        waiting = [asyncio.ensure_future(tokens(engine, "refused by the old one"))]
        await until(lambda: len(pipelines["old"].requests) == 1)
        names.discard("old")
        await until(lambda: pipelines["old"].gave_up)
        waiting.append(asyncio.ensure_future(tokens(engine, "found nobody")))
        await asyncio.sleep(0.2)
        assert not any(one.done() for one in waiting)
        pipelines["new"].reachable()
        assert await asyncio.gather(*waiting) == [(3,), (3,)]

    running(pipelines, test)


def test_a_client_that_leaves_is_cancelled_where_its_request_runs():
    """Closing the stream closes the pipeline's, and its load is gone."""
    event = asyncio.Event()
    pipelines = {"a": Pipeline(paused(event, 1))}

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        stream = engine.stream(request("x"))
        assert (await anext(stream)).tokens == (1,)
        with pytest.raises(InvalidField, match="already running"):
            await tokens(engine, "x")
        await stream.aclose()  # type: ignore[attr-defined]
        assert pipelines["a"].closed == ["x"]
        assert (await engine.status())["pipelines"] == [{"name": "a", "status": "ok", "load": 0}]

    running(pipelines, test)


def test_health_counts_the_sequences_of_all():
    """Sums of what runs and waits; the status of the best."""
    pipelines = {name: Pipeline([]) for name in "ab"}
    pipelines["a"].state = Health("degraded", "no drafts", running=2, waiting=1)
    pipelines["b"].state = Health("ok", "", running=3)

    async def test(engine: RoutingEngine, names: set[str]) -> None:
        await until(lambda: all(one.connected for one in pipelines.values()))
        assert await engine.health() == Health("ok", "", running=5, waiting=1)

    running(pipelines, test)


def test_before_the_first_pipeline_everything_is_unavailable():
    """The card, metrics and requests say so in their own class."""
    engine = RoutingEngine(Router("prefix", block_tokens=16, slack=4), set, lambda name: Pipeline([]))
    with pytest.raises(SpecserveError):
        _ = engine.card

    async def ask() -> None:
        assert (await engine.health()).status == "starting"
        with pytest.raises(Unavailable):
            await engine.timeline()
        with pytest.raises(Unavailable):
            await tokens(engine, "x")

    asyncio.run(ask())
