"""Clients take turns in the queue, and one that floods it keeps nobody else out."""

from __future__ import annotations

from collections import deque

import pytest
from harness import Pipeline
from toy_workers import reference

from specserve.coordinator.fairness import enqueue, has_room
from specserve.coordinator.requests import RequestState
from specserve.errors import Overloaded
from specserve.types import Request, RequestId, RowId

FLOOD = 12


def state(name, client, epoch=0):
    request = Request(RequestId(name), (1,), 4, client=client)
    return RequestState(RowId(0), request, "me", 0.0, [1], None, epoch=epoch)


def queued(*clients, running=()):
    """The names of requests in the order of the queue; they came as a0, b1, … in the order of `clients`."""
    waiting = deque()
    for number, client in enumerate(clients):
        enqueue(waiting, [state("r", each) for each in running], state(f"{'xabc'[client]}{number}", client))
    return [each.request.id for each in waiting]


@pytest.mark.parametrize(
    ("clients", "running", "expected"),
    [
        ((1, 1, 1), (), ["a0", "a1", "a2"]),
        ((1, 1, 1, 2), (), ["a0", "b3", "a1", "a2"]),
        ((1, 1, 1, 2, 2, 3), (), ["a0", "b3", "c5", "a1", "b4", "a2"]),
        ((1, 1, 2), (1, 1), ["b2", "a0", "a1"]),
        ((1, 2, 1), (2,), ["a0", "b1", "a2"]),
        ((0, 0, 0), (0,), ["x0", "x1", "x2"]),
    ],
)
def test_a_request_waits_behind_those_of_no_higher_number(clients, running, expected):
    """First come first served within a client and where there is one only; running requests count."""
    assert queued(*clients, running=running) == expected


def test_who_lost_its_place_is_not_overtaken():
    """A preempted request stays in front, whatever number it would have."""
    waiting = deque([state("p", 1, epoch=1)])
    enqueue(waiting, [state("r", 1)] * 5, state("b", 2))
    assert [each.request.id for each in waiting] == ["p", "b"]


def test_a_full_queue_has_room_for_those_with_less_than_their_share():
    """Alone a client may fill it; then each of two may have half, and no more."""
    full = [state(f"a{n}", 1) for n in range(8)]
    assert not has_room(full, 1, 8)
    assert has_room(full, 2, 8)
    assert has_room([*full, *(state(f"b{n}", 2) for n in range(3))], 2, 8)
    assert not has_room([*full, *(state(f"b{n}", 2) for n in range(4))], 2, 8)
    assert has_room(full[:7], 1, 8)


def test_a_flood_of_one_client_does_not_hold_up_another():
    """The other's only request is answered before the flood's second half, and the flood is told to wait."""
    here = Pipeline(max_requests=2, queue_limit=FLOOD - 2, end=1000)
    refused = 0
    for number in range(2 * FLOOD):
        try:
            here.submit(f"a{number}", [number, 3], 6, client=1)
        except Overloaded:
            refused += 1
    assert refused == FLOOD
    here.submit("b", [50, 60], 6, client=2)
    order = []
    for _ in range(5000):
        if not here.step():
            break
        order += [name for name in here.deltas if here.deltas[name][-1].finish and name not in order]
    assert len(order) == FLOOD + 1
    assert order.index("b") <= 3
    assert here.tokens("b") == reference([50, 60], 6)
    assert here.idle()
