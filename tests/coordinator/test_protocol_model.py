"""The coordinator's protocol, explored exhaustively within bounds; see `protocol_model` for what counts as a state.

Every order in which requests come, workers work, and their messages arrive; in addition, once or twice in a history,
anything rare: a message that comes late, twice or never, a worker lost or one that says something from an earlier
life, a cancel, and time that runs out. I1 to I5 hold in every state, and from every state all requests come to one end.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from protocol_model import RARE, Bounds, World, explore

from specserve.coordinator.requests import Stage
from specserve.errors import PoolError

ONE = {"a": (1, 2, 3)}
TWO = ONE | {"b": (4, 5, 6, 7, 8)}
ROOMY = {"depth": 1, "blocks": 16, "draft_blocks": 16, "max_requests": 2, "max_batch_tokens": 16, "prefill_chunk": 4}
TIGHT = ROOMY | {"context": 8, "blocks": 2, "draft_blocks": 2}
"""Two requests of six tokens each do not fit into two blocks of four: one is preempted."""


def bounds(prompts, max_tokens, rare, outcomes, **settings):
    return Bounds(prompts, max_tokens, rare, ROOMY | {"outcomes": outcomes} | settings)


@pytest.mark.parametrize("outcomes", [0, pytest.param(2, marks=pytest.mark.full)])
def test_every_order_of_two_requests_and_their_messages(outcomes, record_property):
    """Nothing rare happens: all interleavings of two requests, in one process and with drafts ahead."""
    found = explore(bounds(TWO, 2, 0, outcomes), most=2000)
    record_property("explored", str(found))
    assert found.states > 40
    assert found.steps > found.states


@pytest.mark.parametrize(("outcomes", "max_tokens"), [(0, 3), (2, 2)])
def test_one_rare_event_at_every_moment_of_one_request(outcomes, max_tokens, record_property):
    """Each kind of rare event was tried, at every moment at which it may happen."""
    found = explore(bounds(ONE, max_tokens, 1, outcomes), most=2000)
    record_property("explored", str(found))
    assert found.states > 150
    assert found.kinds.keys() >= RARE - {"late", "stale"}  # these need a second one, or two pushes under way


@pytest.mark.full
@pytest.mark.parametrize(("outcomes", "max_tokens"), [(0, 3), (2, 2)])
def test_two_rare_events_in_one_history(outcomes, max_tokens, record_property):
    """Also what a worker said in a life that is over, which needs the loss first."""
    found = explore(bounds(ONE, max_tokens, 2, outcomes), most=20_000)
    record_property("explored", str(found))
    assert found.kinds["stale"] > 0


class RareBesidePreempted(World):
    """Anything rare happens only while a request waits for its place again: otherwise there are too many states."""

    def _if_left(self, kind, subject):
        states = self.here.engine._states.values()
        if any(state.epoch and state.stage is Stage.WAITING for state in states):
            yield from super()._if_left(kind, subject)


@pytest.mark.full
@pytest.mark.timeout(2400)  # two minutes of one core, however many share it
@pytest.mark.parametrize(("outcomes", "make"), [(0, World), (2, RareBesidePreempted)])
def test_one_rare_event_among_two_requests_of_which_one_is_preempted(outcomes, make, record_property):
    """Preemption meets losses, cancels and late messages."""
    found = explore(bounds({"a": (1, 2, 3), "b": (4, 5, 6)}, 3, 1, outcomes, **TIGHT), most=20_000, make=make)
    record_property("explored", str(found))
    assert found.preempted > 1000
    assert found.kinds.keys() >= RARE - {"late", "stale"}


class KeepsSlots(World):
    """Forgets to give slots back."""

    def __init__(self, bounds):
        super().__init__(bounds)
        self.here.engine._slots.free = lambda slots: None


class BelievesTheDead(World):
    """Takes what a worker said in an earlier life for what it says now."""

    def __init__(self, bounds):
        super().__init__(bounds)
        engine = self.here.engine
        receive, verifier = engine.receive, engine._verifier
        engine.receive = lambda item: receive(
            replace(item, life=verifier.life if item.peer == "target" else engine._draft_life or 0)
        )


class NeverCancels(World):
    """Takes a cancel for done without ending the request."""

    def _cancel(self, name):
        self.cancelled.append(name)
        self.here.engine._states.pop(name)


@pytest.mark.parametrize(
    ("broken", "rare", "error"),
    [(KeepsSlots, 0, PoolError), (BelievesTheDead, 2, Exception), (NeverCancels, 1, Exception)],
)
def test_a_coordinator_that_breaks_an_invariant_is_found(broken, rare, error):
    """And the history that leads there is told."""
    with pytest.raises(error) as found:
        explore(bounds(ONE, 3, rare, 0), most=5000, make=broken)
    assert not isinstance(found.value, OverflowError)
    assert found.value.__notes__[0].startswith("after admit-a")
