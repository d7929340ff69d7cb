"""What the supervisor hears of the coordinator, without Ray."""

from __future__ import annotations

import threading

import pytest

from specserve import config as configs
from specserve.cluster import coordinator_actor
from specserve.cluster.coordinator_actor import CoordinatorActor
from specserve.transport import PeerLost


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
