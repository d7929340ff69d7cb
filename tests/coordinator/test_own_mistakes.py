"""A mistake in the coordinator itself harms one request where it is known which, and otherwise ends its process."""

from __future__ import annotations

import pytest
from delivery_model import INGRESS, World
from harness import Pipeline
from toy_workers import VOCAB, reference

from specserve.coordinator.guarded import Guarded
from specserve.coordinator.loop import Loop
from specserve.errors import Unavailable
from specserve.transport import Mailbox

PROMPTS = {"a": [1, 2, 3], "b": [4, 5, 6, 7]}
TOKENS = 8


class Careless:
    """A speculator that stumbles over rows with the token 7, at the named moment."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.rows: dict[int, list[int]] = {}

    def _stumble(self, moment: str, row: int) -> None:
        if moment == self.moment and 7 in self.rows[row]:
            raise IndexError(moment)

    def open(self, row, tokens):
        self.rows[row] = list(tokens)
        self._stumble("open", row)

    def extend(self, row, tokens):
        self.rows[row] += tokens
        self._stumble("extend", row)

    def guess(self, row, depth):
        self._stumble("guess", row)
        wrong = self.moment == "token" and 7 in self.rows[row]
        return [VOCAB if wrong else 1] * depth

    def close(self, row):
        self._stumble("close", row)
        del self.rows[row]


@pytest.mark.parametrize("moment", ["open", "extend", "guess", "close", "token"])
def test_a_speculator_that_fails_costs_its_request_the_drafts(moment):
    """Both answers are the target's; only the one that it does not stumble over goes on with drafts."""
    here = Pipeline(guesser=Careless(moment), draft=False, depth=2, end=1000)
    for name, prompt in PROMPTS.items():
        here.submit(name, prompt, TOKENS)
    here.settle()
    for name, prompt in PROMPTS.items():
        assert here.tokens(name) == reference(prompt, TOKENS)
    assert here.last("a").stats.drafted_tokens > 0
    assert (here.last("b").stats.drafted_tokens == 0) == (moment in ("open", "guess", "token"))
    assert here.idle()


def test_a_row_is_tried_again_when_it_is_opened_again():
    """After a preemption, or under a number that another request had."""
    careless = Careless("guess")
    guarded = Guarded(careless, VOCAB)
    guarded.open(1, [7])
    assert guarded.guess(1, 2) == []
    careless.moment = ""
    assert guarded.guess(1, 2) == []
    guarded.open(1, [7])
    assert guarded.guess(1, 2) == [1, 1]


class Keeping:
    """A speculator that takes the tokens that it is given for its own, and empties them or adds to them."""

    def __init__(self, emptying: bool) -> None:
        self.emptying = emptying
        self.rows: dict[int, list[int]] = {}

    def open(self, row, tokens, prompt_length=0, prediction=()):
        self.rows[row] = tokens
        if self.emptying:
            tokens.clear()

    def extend(self, row, tokens):
        self.rows[row] += tokens
        tokens.append(1)

    def guess(self, row, depth):
        return (self.rows[row] * depth)[-depth:]

    def close(self, row):
        self.rows.pop(row)


@pytest.mark.parametrize("emptying", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["the deployment's", "a request's"])
def test_a_speculator_that_keeps_what_it_is_given_changes_no_text(own, emptying):
    """Whether it is everybody's or a request's own: its lists are its own, and the answers are the target's."""
    keeping = Keeping(emptying)
    guessers = {"guessers": {"keeping": keeping}} if own else {"guesser": keeping}
    here = Pipeline(draft=False, depth=2, end=1000, **guessers)
    for name, prompt in PROMPTS.items():
        here.submit(name, prompt, TOKENS, source="keeping" if own else None)
    here.settle()
    for name, prompt in PROMPTS.items():
        assert here.tokens(name) == reference(prompt, TOKENS)
    assert here.last("a").stats.drafted_tokens > 0
    assert here.idle()


def broken(engine, method, when=lambda *_: True):
    """The engine's method raises from now on, where the condition holds."""
    working = getattr(engine, method)

    def raising(*arguments):
        if when(*arguments):
            raise ZeroDivisionError(method)
        return working(*arguments)

    setattr(engine, method, raising)


def test_a_request_that_cannot_be_admitted_fails_alone():
    """It is told so with a 500; the one beside it has its answer."""
    world = World(depth=0)
    world.connect()
    broken(world.coordinator.pipeline.engine, "_check_request", lambda request: request.id == "b")
    for name, prompt in PROMPTS.items():
        world.ask(name, prompt, TOKENS)
    world.settle()
    assert world.tokens("a") == reference(PROMPTS["a"], TOKENS)
    failure = world.deltas["b"][-1].failure
    assert (failure.status, failure.code) == (500, "internal_error")
    assert "ZeroDivisionError" in failure.message


def carried(world):
    """One step of the coordinator, and all that is under way before and behind it."""
    world.coordinator.step()
    for way in world.ways:
        while way.frames:
            world.carry(way)
    world.read()


def fails(world):
    """Whether the coordinator raises within a few steps."""
    try:
        for _ in range(10):
            world.coordinator.step()
    except ZeroDivisionError:
        return True
    return False


@pytest.mark.parametrize("method", ["advance", "flush", "_commit"])
def test_a_coordinator_that_fails_says_nothing_and_its_requests_go_on(method):
    """It is dead to its supervisor, takes no ingress, and the next one brings every answer to its end, once."""
    world = World(depth=0)
    world.connect()
    for name, prompt in PROMPTS.items():
        world.ask(name, prompt, TOKENS)
    while not all(world.tokens(name) for name in PROMPTS):
        carried(world)
    engine, loop = world.coordinator.pipeline.engine, world.coordinator.loop
    broken(engine, method)
    assert fails(world)
    loop._fail("the coordinator failed")
    world.read()
    assert world.open.keys() == PROMPTS.keys()
    assert engine.health().status == "dead"
    with pytest.raises(Unavailable, match="being replaced"):
        loop.welcome(INGRESS, 1, 0, pytest.fail)
    world.kill()
    world.settle()
    for name, prompt in PROMPTS.items():
        assert world.deltas[name][-1].failure is None
        assert world.tokens(name) == reference(prompt, TOKENS)


def test_where_nobody_restarts_it_every_client_is_told():
    """In one process there is no next coordinator: a 500 for each, and nobody waits."""
    here = Pipeline(draft=False)
    for name, prompt in PROMPTS.items():
        here.submit(name, prompt, TOKENS)
    Loop(here.engine, Mailbox())._fail("the coordinator failed: ZeroDivisionError")
    assert {here.last(name).failure.status for name in PROMPTS} == {500}


def test_the_loop_itself_gives_up_on_a_mistake():
    """And answers calls after that: the supervisor has to hear that it is dead."""
    here = Pipeline(draft=False)
    here.submit("a", [1, 2, 3], TOKENS)
    broken(here.engine, "advance")
    loop = Loop(here.engine, Mailbox())
    loop.start()
    try:
        assert loop.call(lambda: here.engine.unfinished).result(5) >= 0
        assert loop.call(here.engine.health).result(5).status == "dead"
        assert here.last("a").failure.code == "internal_error"
    finally:
        loop.stop()
