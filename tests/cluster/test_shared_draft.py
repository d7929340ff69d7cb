"""One draft worker for two pipelines, on real Ray: the same text, and no harm from one pipeline to the other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from bare_pipeline import greedy
from cluster_facts import TOKENS
from deployment import complete, served
from deployment import drafted as drafts_of
from deployment import until as until_served
from shared_pipelines import Served, drafted, shared, streamed, two_served, under_streams

from specserve.cluster import draft_keeper
from specserve.cluster.launch import pipeline_states
from specserve.cluster.pipeline import PipelineState
from specserve.cluster.shared_draft_actor import SharedDraftActor
from specserve.local import LocalEngine
from specserve.types import Sampling

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.1)


async def both_healthy(pipelines: list[Served]) -> None:
    await asyncio.gather(*(each.healthy() for each in pipelines))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def seeded(name: str):
    """By chance, under the rule whose seeded answers do not depend on drafts."""
    return replace(greedy(name), sampling=Sampling(temperature=1.0), seed=11, rule="coupled")


def test_one_draft_worker_drafts_for_two_pipelines(ray_here, config, expected):
    """Both answer at once, with drafts of the same process."""

    async def run() -> None:
        async with two_served(shared(config)) as (_, pair):
            assert len({each.supervisor.pids["draft"] for each in pair}) == 1
            answers = await asyncio.gather(*(streamed(each.engine, greedy("a")) for each in pair))
            assert [answer.tokens for answer in answers] == [expected] * 2
            assert all(drafted(answer) for answer in answers)

    asyncio.run(run())


@pytest.mark.full
def test_the_shared_draft_worker_may_die(ray_here, config, expected):
    """Both answer with drafts of one process; when it is killed both streams go on, and both get drafts again."""

    async def run() -> None:
        async with two_served(shared(config)) as (keeper, pair):
            (pid,) = {each.supervisor.pids["draft"] for each in pair}
            assert await keeper.free(draft_keeper.kinship(shared(config))) == 0
            assert "shared by 2 of 2 pipelines" in pair[0].supervisor.progress["draft"]

            async def end_the_draft() -> None:
                kill(pid)

            answers = await under_streams(pair, [greedy("a"), greedy("b")], end_the_draft)
            assert [answer.tokens for answer in answers] == [expected] * 2
            await until(lambda: all(each.supervisor.pids["draft"] not in (0, pid) for each in pair))
            await both_healthy(pair)
            again = await asyncio.gather(*(streamed(each.engine, greedy("c")) for each in pair))
            assert [answer.tokens for answer in again] == [expected] * 2
            assert all(drafted(answer) for answer in again)
            assert len({each.supervisor.pids["draft"] for each in pair}) == 1

    asyncio.run(run())


@pytest.mark.full
def test_a_verifier_that_dies_leaves_the_other_pipeline_its_drafts(ray_here, config, expected):
    """The other stream ends meanwhile, drafted for all the way; the draft worker is the same process all along."""

    async def run() -> None:
        async with two_served(shared(config)) as (_, pair):
            pids = [each.supervisor.pids for each in pair]

            async def end_a_verifier() -> None:
                kill(pids[0]["target"])

            answers = await under_streams(pair, [greedy("a"), greedy("b")], end_a_verifier)
            assert [answer.tokens for answer in answers] == [expected] * 2
            assert drafted(answers[1])
            await both_healthy(pair)
            assert {each.supervisor.pids["draft"] for each in pair} == {pids[0]["draft"]}
            assert drafted(await streamed(pair[0].engine, greedy("c")))

    asyncio.run(run())


@pytest.mark.full
@pytest.mark.parametrize("outcomes", [0, 4])
def test_seeded_answers_are_those_of_one_process(ray_here, config, outcomes):
    """Under `coupled`, drafting behind and ahead of verdicts: four answers at once on each of two pipelines."""
    with LocalEngine(config) as engine:
        (alone,) = engine.complete([seeded("x")])
    assert len(alone.tokens) == TOKENS

    async def run() -> None:
        async with two_served(shared(config, outcomes=outcomes)) as (_, pair):
            answers = await asyncio.gather(*(streamed(each.engine, seeded(f"{n}")) for n in range(4) for each in pair))
            assert [answer.tokens for answer in answers] == [alone.tokens] * len(answers)
            # Ahead of a target this small drafts come late; that they are used there is for slower devices to show.
            assert outcomes or sum(answer.stats.kept_tokens for answer in answers) > 0

    asyncio.run(run())


@pytest.mark.full
def test_a_pipeline_that_ends_gives_its_share_back(ray_here, config, expected):
    """Its neighbour's stream goes on with drafts, and the share is free for another pipeline."""

    async def run() -> None:
        both = shared(config)
        async with two_served(both) as (keeper, pair):

            async def end_a_pipeline() -> None:
                await pair[0].supervisor.stop()

            stream = asyncio.ensure_future(streamed(pair[1].engine, greedy("b")))
            await end_a_pipeline()
            answer = await stream
            assert answer.tokens == expected
            assert drafted(answer)
            assert await keeper.free(draft_keeper.kinship(both)) == 1
            assert await keeper.free("another kind") == 0

    asyncio.run(run())


@pytest.mark.full
def test_a_coordinator_that_dies_is_joined_to_its_share_again(ray_here, config, expected):
    """Both streams end with their text, and both pipelines draft afterwards."""

    async def run() -> None:
        async with two_served(shared(config)) as (_, pair):
            pid = pair[0].supervisor.pids["coordinator"]

            async def end_a_coordinator() -> None:
                kill(pid)

            answers = await under_streams(pair, [greedy("a"), greedy("b")], end_a_coordinator)
            assert [answer.tokens for answer in answers] == [expected] * 2
            assert drafted(answers[1])
            await until(lambda: pair[0].supervisor.pids["coordinator"] != pid)
            await both_healthy(pair)
            assert drafted(await streamed(pair[0].engine, greedy("c")))

    asyncio.run(run())


@pytest.mark.full
def test_a_shared_worker_that_hangs_is_replaced_for_all(ray_here, config, expected, monkeypatch, tmp_path):
    """No pipeline may end it; its keeper does, after hang_after_s, and both are joined to the new process."""

    class Hanging(SharedDraftActor):
        def _built(self, ranks):
            info = super()._built(ranks)
            mark, plans = tmp_path / "hung", self._drafts.plans

            def hang(asked):
                if not mark.exists():
                    mark.touch()
                    import threading

                    threading.Event().wait()
                return plans(asked)

            self._drafts.plans = hang
            return info

    monkeypatch.setattr(draft_keeper, "SharedDraftActor", Hanging)

    async def run() -> None:
        async with two_served(shared(config, hang_after_s=3.0)) as (_, pair):
            (pid,) = {each.supervisor.pids["draft"] for each in pair}
            answers = await asyncio.gather(*(streamed(each.engine, greedy("a")) for each in pair))
            assert [answer.tokens for answer in answers] == [expected] * 2
            await until(lambda: all(each.supervisor.pids["draft"] not in (0, pid) for each in pair))
            await both_healthy(pair)
            again = await asyncio.gather(*(streamed(each.engine, greedy("b")) for each in pair))
            assert all(drafted(answer) for answer in again)

    asyncio.run(run())


@pytest.mark.full
def test_an_application_shares_by_configuration(ray_here, config, expected_text):
    """Over HTTP: two pipelines, one draft process, which dies; every answer has its text, and drafts come again."""
    asked = shared(config)
    cluster = asked.cluster.model_copy(update={"routing": "round_robin"})
    with served(asked.model_copy(update={"cluster": cluster})) as url, ThreadPoolExecutor(4) as clients:
        first, second = pipeline_states()
        assert first.keeper == second.keeper is not None
        pid = first.pids["draft"]
        assert second.pids["draft"] == pid
        assert first.pids["target"] != second.pids["target"]
        answers = [clients.submit(complete, url) for _ in range(4)]
        kill(pid)
        assert {answer.result()["choices"][0]["text"] for answer in answers} == {expected_text}
        until_served(lambda: all(_drafts_again(state, pid) for state in pipeline_states()))
        again = [clients.submit(complete, url) for _ in range(4)]
        assert {answer.result()["choices"][0]["text"] for answer in again} == {expected_text}
        assert all(drafts_of(answer.result()) > TOKENS / 2 for answer in again)


def _drafts_again(state: PipelineState, pid: int) -> bool:
    return state.health.status == "ok" and state.pids["draft"] not in (0, pid)
