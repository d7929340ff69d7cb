"""When those come back for whom there was no room, and what is kept from them until then."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from scripted_engine import ScriptedEngine, app_of, complete, said

from specserve.api.access import Admission
from specserve.api.turns import LONGEST_S, Turns
from specserve.config import ServerConfig
from specserve.errors import Overloaded


def test_a_crowd_is_spread_over_the_time_in_which_places_become_free():
    """400 that come at once to 64 places, whose answers take 4 s: even turns, 1.5 times as fast."""
    turns = Turns(64, clock=lambda: 100.0)
    for _ in range(100):
        turns.ended(4.0)
    told = [turns.next_s(running=464) for _ in range(400)]
    assert told[0] == pytest.approx(1.0)
    gaps = [after - before for before, after in itertools.pairwise(told)]
    assert gaps == pytest.approx([4.0 / (1.5 * 64)] * 399, rel=0.01)


def test_nobody_is_sent_away_for_longer_than_clients_wait():
    """More than fit into a minute take turns between the others."""
    turns = Turns(1, clock=lambda: 0.0)
    told = [turns.next_s(running=1) for _ in range(100)]
    assert min(told) == 1.0
    assert max(told) <= LONGEST_S


def test_turns_that_have_passed_are_forgotten():
    """Who comes later is told the shortest time again."""
    now = [0.0]
    turns = Turns(64, clock=lambda: now[0])
    assert [turns.next_s(64) for _ in range(100)][-1] > 5
    now[0] = 60.0
    assert turns.next_s(64) == 1.0


class House:
    """The application behind the door; it refuses while it is full."""

    def __init__(self) -> None:
        self.full = True
        self.asked = 0

    async def __call__(self, scope, receive, send):
        self.asked += 1
        if self.full:
            raise Overloaded("the queue is full (0 requests wait); try again later")


def ask(door: Admission, path: str = "/v1/completions", key: int | None = None) -> float | None:
    """None, or when to come back."""
    scope = {"type": "http", "method": "POST", "path": path, "specserve.key": key}
    try:
        asyncio.run(door(scope, None, None))
    except Overloaded as error:
        return error.retry_after_s
    return None


def test_who_comes_to_a_full_engine_is_sent_away_at_the_door():
    """The engine is not asked again for a tenth of a second, except for other keys and other paths."""
    now, house = [0.0], House()
    door = Admission(house, ServerConfig(), places=64, clock=lambda: now[0])
    first, second = ask(door), ask(door)
    assert house.asked == 1
    assert 1.0 == first < second
    assert ask(door, key=1) is not None
    assert ask(door, path="/tokenize") is not None
    assert house.asked == 3
    now[0] = 0.2
    house.full = False
    assert ask(door) is None
    assert house.asked == 4


def test_the_end_of_an_answer_opens_the_door():
    """A place is free then, whoever comes next."""
    house = House()
    door = Admission(house, ServerConfig(), places=64, clock=lambda: 0.0)
    assert ask(door) is not None
    house.full = False
    assert ask(door, key=1) is None
    assert ask(door) is None


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_says_when(stream):
    """In whole seconds for all clients, and to the millisecond for those that read it."""
    engine = ScriptedEngine(lambda request: [Overloaded("full")] if len(engine.requests) < 2 else said("x"))
    response = complete(app_of(engine), stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.headers["retry-after-ms"] == "1000"
