"""The supervisor and the remote engine without Serve, on both transports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from bare_pipeline import answer, answers, greedy, serving, supervisor_of
from cluster_facts import PROMPT

from specserve.cluster import calls
from specserve.cluster import supervisor as supervisors
from specserve.cluster.actors import WORKER_ACTORS, VerifierActor
from specserve.cluster.pipeline import Pipeline
from specserve.cluster.remote import RemoteEngine
from specserve.config import Config
from specserve.errors import ConfigError, RequestError, SpecserveError, Unavailable
from specserve.transport.messages import Plan, PlanAhead, Verify

pytestmark = pytest.mark.ray

POISON = 77


def with_cluster(config: Config, **changes: object) -> Config:
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.1)


async def healthy(engine: RemoteEngine) -> None:
    async with asyncio.timeout(90):
        while (await engine.health()).status != "ok":
            await asyncio.sleep(0.1)


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


def stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def continued(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.full
def test_a_start_that_takes_long_is_no_stall(ray_here, config):
    """While it starts, and right after, a pipeline is healthy to Serve however long that takes."""
    hasty = config.model_copy(update={"engine": config.engine.model_copy(update={"hang_after_s": 0.5})})

    async def run() -> bool:
        pipeline = Pipeline(hasty.model_dump())
        would_stall = False
        try:
            serving = asyncio.ensure_future(pipeline.status())
            while not serving.done():
                await pipeline.check_health()
                if pipeline._supervisor is not None:
                    with contextlib.suppress(Unavailable):
                        pipeline._supervisor.check()
                        await asyncio.sleep(0.02)
                        continue
                    would_stall = True
                await asyncio.sleep(0.02)
            assert await serving
            await pipeline.check_health()
        finally:
            await pipeline.stop()
        return would_stall

    assert asyncio.run(run())


@pytest.mark.full
def test_streams_that_are_open_at_the_end_are_told(ray_here, config):
    """Stopping while a stream is open: its last delta says that the server is shutting down, with status 503."""

    async def run() -> None:
        async with serving(config) as (supervisor, engine):
            deltas = engine.stream(greedy("a"))
            assert (await anext(deltas)).failure is None
            await supervisor.stop()
            failure = [delta async for delta in deltas][-1].failure
        assert failure is not None
        assert (failure.status, failure.code) == (503, "unavailable")
        assert failure.message == "the server is shutting down"

    asyncio.run(run())


@pytest.mark.full
def test_rounds_that_stop_are_bad_health(ray_here, config, monkeypatch):
    """Idle for longer than the bound is healthy; work without a round that ends is not, though everybody answers."""

    class Wedged(VerifierActor):  # in here, so that it travels by value: workers cannot import this file
        """Its process lives, beats and answers, but its first round never ends."""

        def load(self):
            info = super().load()
            handle = self._worker.handle

            def stuck(message):
                if isinstance(message, Verify):
                    threading.Event().wait()
                return handle(message)

            self._worker.handle = stuck
            return info

    monkeypatch.setattr(supervisors, "_STALL_PATIENCE", 4.0 / config.engine.hang_after_s)
    monkeypatch.setitem(supervisors.WORKER_ACTORS, "target", Wedged)

    async def run() -> None:
        async with serving(config) as (supervisor, engine):
            await asyncio.sleep(5)
            supervisor.check()
            stream = asyncio.ensure_future(answer(engine, greedy("a")))
            await until(lambda: supervisor.health.running == 1)
            supervisor.check()
            await asyncio.sleep(6)
            with pytest.raises(Unavailable, match="no round ended"):
                supervisor.check()
            stream.cancel()

    asyncio.run(run())


@pytest.mark.full
@pytest.mark.parametrize("role", ["coordinator", "target", "draft"])
def test_a_stuck_process_is_replaced(ray_here, config, expected, monkeypatch, role):
    """A process that is stopped is replaced by another; when it continues, answers are still right."""
    monkeypatch.setattr(calls, "STATE_TIMEOUT_S", 2.0)

    async def run() -> None:
        async with serving(config) as (supervisor, engine):
            pid = supervisor.pids[role]
            stopped(pid)
            try:
                await until(lambda: supervisor.pids[role] != pid)
            finally:
                continued(pid)
            await healthy(engine)
            assert await answer(engine, greedy("a")) == expected
            assert await answer(engine, greedy("b")) == expected

    asyncio.run(run())


@pytest.mark.full
def test_a_worker_that_only_pauses_keeps_its_process(ray_here, config, expected):
    """A pause longer than lost_after_s, shorter than the limit of `state`: a new life of the same process."""

    async def run() -> None:
        async with serving(config) as (supervisor, engine):
            pid = supervisor.pids["target"]
            stopped(pid)
            await until(lambda: supervisor.health.status == "starting")
            await asyncio.sleep(2)
            continued(pid)
            await healthy(engine)
            assert await answer(engine, greedy("a")) == expected
            assert supervisor.pids["target"] == pid

    asyncio.run(run())


@pytest.mark.full
@pytest.mark.parametrize("deaths", [1, 99])
def test_a_worker_that_dies_while_loading_is_tried_again(ray_here, config, expected, monkeypatch, tmp_path, deaths):
    """One death while loading is survived; when every try ends so, a ConfigError says which worker and why."""

    class Dying(VerifierActor):
        def load(self):
            died = len(list(Path(tmp_path).iterdir()))
            if died < deaths:
                (Path(tmp_path) / str(died)).touch()
                os._exit(1)
            return super().load()

    monkeypatch.setitem(supervisors.WORKER_ACTORS, "target", Dying)
    if deaths == 1:
        assert asyncio.run(answers(config, greedy("a"))) == [expected]
    else:
        with pytest.raises(ConfigError, match=r"target worker died while loading.*out of memory"):
            asyncio.run(answers(config, greedy("a")))


@pytest.mark.full
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_that_hangs_in_a_batch_is_replaced(ray_here, config, expected, monkeypatch, tmp_path, role):
    """Its heart beats and its `state` answers, but a batch never ends: after hang_after_s its process is another."""

    class Hanging(WORKER_ACTORS[role]):  # type: ignore[misc]
        def load(self):
            info = super().load()
            mark = Path(tmp_path) / "hung"
            handle = self._worker.handle

            def hang(message):
                if isinstance(message, Verify | Plan | PlanAhead) and not mark.exists():
                    mark.touch()
                    threading.Event().wait()
                return handle(message)

            self._worker.handle = hang
            return info

    monkeypatch.setitem(supervisors.WORKER_ACTORS, role, Hanging)
    hasty = config.model_copy(update={"engine": config.engine.model_copy(update={"hang_after_s": 1.5})})

    async def run() -> None:
        async with serving(hasty) as (supervisor, engine):
            pid = supervisor.pids[role]
            assert await answer(engine, greedy("a")) == expected
            await until(lambda: supervisor.pids[role] != pid)
            await healthy(engine)
            assert await answer(engine, greedy("b")) == expected

    asyncio.run(run())


@pytest.mark.full
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_short_of_memory_serves_on(ray_here, config, expected, monkeypatch, role):
    """Allocations of one of its processes fail, for real, beyond three positions, and always for one token.

    Batches are cut: the request beside that with the token gets its own text, and later ones do. The other is refused
    by a target, and only gets no drafts of a draft. The process stays.
    """

    class Short(WORKER_ACTORS[role]):  # type: ignore[misc]
        def load(self):
            info = super().load()
            holder = self._worker if role == "target" else self._worker._speculator
            backend = holder._backend
            forward = backend.forward

            def short(batch):
                if len(batch.tokens) > 3 or POISON in batch.tokens:
                    import torch

                    torch.empty(1 << 60, dtype=torch.uint8)
                return forward(batch)

            backend.forward = short
            return info

    monkeypatch.setitem(supervisors.WORKER_ACTORS, role, Short)

    async def run() -> None:
        async with serving(config) as (supervisor, engine):
            pid = supervisor.pids[role]
            poisoned = greedy("poisoned", prompt=[POISON, *PROMPT])
            beside, other = await asyncio.gather(
                answer(engine, greedy("a")), answer(engine, poisoned), return_exceptions=True
            )
            assert beside == expected
            if role == "target":
                assert isinstance(other, SpecserveError)
                assert "allocate memory" in other.message
            else:
                assert isinstance(other, tuple)
                assert len(other) == len(expected)
            assert await answer(engine, greedy("b")) == expected
            assert supervisor.pids[role] == pid

    asyncio.run(run())


@pytest.mark.full
def test_a_request_that_ends_its_verifier_is_given_up(ray_here, config, expected, monkeypatch):
    """Three real processes die of it; a stream beside it goes on to its text, and then there is peace."""

    class Fragile(VerifierActor):
        def load(self):
            info = super().load()
            assert self._worker is not None
            handle = self._worker.handle

            def fragile(message):
                if isinstance(message, Verify) and POISON in message.feeds:
                    os._exit(1)
                return handle(message)

            self._worker.handle = fragile  # type: ignore[method-assign]
            return info

    monkeypatch.setitem(supervisors.WORKER_ACTORS, "target", Fragile)

    async def run() -> None:
        async with serving(config) as (supervisor, engine):
            pid = supervisor.pids["target"]
            poisoned = answer(engine, greedy("poisoned", prompt=[POISON, *PROMPT]))
            beside, other = await asyncio.gather(answer(engine, greedy("a")), poisoned, return_exceptions=True)
            assert beside == expected
            assert isinstance(other, SpecserveError)
            assert "died 3 times" in other.message
            assert supervisor.pids["target"] != pid
            await healthy(engine)
            assert await answer(engine, greedy("b")) == expected

    asyncio.run(run())
