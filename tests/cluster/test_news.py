"""What the supervisor hears of the coordinator, without Ray."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from specserve import config as configs
from specserve.cluster import coordinator_actor
from specserve.cluster.coordinator_actor import CoordinatorActor, CoordinatorState, Joined
from specserve.cluster.member import Member
from specserve.cluster.supervisor import Supervisor, _Stall
from specserve.transport import PeerLost
from specserve.types import Health


@pytest.fixture
def coordinator(monkeypatch):
    monkeypatch.setattr(coordinator_actor, "node_address", lambda: ("", "127.0.0.1"))
    monkeypatch.setattr(coordinator_actor, "NEWS_S", 600.0)
    actor = CoordinatorActor(configs.parse({}).model_dump())
    yield actor
    actor.stop()


def test_who_has_seen_a_state_hears_of_a_loss_when_it_happens(coordinator):
    """The first question is answered at once; the next one waits, though nothing else would ever answer it."""
    seen = coordinator.state()
    assert (seen.started, seen.lost) == (False, ())
    threading.Timer(0.3, coordinator._mailbox.put, [PeerLost("draft", 1, "killed")]).start()
    assert coordinator.state(seen).lost == ("draft",)


def test_nothing_new_is_told_in_the_end(coordinator, monkeypatch):
    """A question is not kept for ever: whoever asks finds out by the answer that the process lives."""
    monkeypatch.setattr(coordinator_actor, "NEWS_S", 0.5)
    seen = coordinator.state()
    assert coordinator.state(seen) == seen


def test_an_engine_that_gave_itself_up_is_news(coordinator):
    """Nobody is lost then, and still the supervisor is to replace it now."""
    coordinator._engine = SimpleNamespace(dead=False, away=())
    seen = coordinator.state()
    threading.Timer(0.3, setattr, [coordinator._engine, "dead", True]).start()
    coordinator.state(seen)
    assert coordinator._engine.dead


def test_a_worker_that_is_being_attached_is_lost_until_it_is_there(coordinator, monkeypatch):
    """Never neither, as if it hung. A loss of the new life, noted meanwhile, stays."""
    heard = []

    def attach(role, channel, life, info):
        heard.append(coordinator._absences())
        coordinator._engine.away = ()

    coordinator._engine = SimpleNamespace(dead=False, away=("draft",), attach=attach)
    coordinator._loop = SimpleNamespace(call=lambda function: SimpleNamespace(result=function))
    monkeypatch.setattr(coordinator, "_channel", lambda role, joined: heard.append(coordinator._absences()))
    monkeypatch.setattr(coordinator, "_end_engine", lambda reason: None)
    coordinator._mailbox.put(PeerLost("draft", 1, "killed"))
    coordinator.attach("draft", Joined(None, 2, None, None))
    assert heard == [(True, ("draft",), ())] * 2
    assert coordinator._absences() == (True, (), ())

    coordinator._mailbox.put(PeerLost("draft", 2, "killed"))
    coordinator.attach("draft", Joined(None, 2, None, None))
    assert coordinator._absences() == (True, ("draft",), ())


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_worker_that_has_come_back_is_not_judged_by_an_older_answer(turns):
    """The question waited while it was lost, and its answer comes when it has just joined."""

    async def run() -> None:
        loop, killed, attached, questions = asyncio.get_running_loop(), [], [], []
        there, news = loop.create_future(), loop.create_future()
        health = Health("degraded", "", 1, 0)

        async def nothing(*arguments):
            return None

        def state(*seen):
            questions.append(seen)
            answer = loop.create_future()
            if len(questions) == 1:
                answer.set_result(CoordinatorState(1, True, health, ("draft",), (), 5))
            return news if len(questions) == 2 else answer

        def attach(role, joined):
            attached.append(role)
            return there

        def accept(role, life):
            answer = loop.create_future()
            answer.set_result(None)
            return answer

        ranks = SimpleNamespace(own=True, handle=None, kill=lambda: killed.append("draft"))
        ranks.make_ready = ranks.state = ranks.connect = nothing
        ranks.load = lambda: asyncio.sleep(0, result=SimpleNamespace())
        ranks.state_or_kill = lambda: asyncio.sleep(100)
        supervisor = Supervisor.__new__(Supervisor)
        supervisor._ended = supervisor._recovering = False
        supervisor._health, supervisor._stall = health, _Stall()
        supervisor._config = configs.parse({})
        supervisor._members = {"draft": Member("draft", ranks)}
        calls = {"state": state, "attach": attach, "accept": accept}
        supervisor._coordinator = SimpleNamespace(
            **{name: SimpleNamespace(remote=call) for name, call in calls.items()}
        )
        watching = asyncio.create_task(supervisor.watch())
        while not attached or len(questions) < 2:
            await asyncio.sleep(0.01)
        there.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        news.set_result(CoordinatorState(1, True, health, ("draft",), ("draft",), 5))
        while len(questions) < 3:
            await asyncio.sleep(0.01)
        watching.cancel()
        assert (killed, attached) == ([], ["draft"])

    asyncio.run(asyncio.wait_for(run(), 30))
