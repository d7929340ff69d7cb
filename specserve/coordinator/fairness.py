"""Whose turn it is in the queue: clients take turns, so that one with many requests does not keep the others waiting.

Fair queueing by requests (Nagle, "On packet switches with infinite storage", 1987): a request's place is behind those
that are at most the same number among their own client's requests, running ones included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableSequence, Sequence

from specserve.coordinator.requests import RequestState


def enqueue(waiting: MutableSequence[RequestState], running: Iterable[RequestState], state: RequestState) -> None:
    """Put a new request where its client's turn is. One that lost its place is never overtaken."""
    numbers = Counter(each.request.client for each in running)
    mine = numbers[state.request.client] + sum(each.request.client == state.request.client for each in waiting)
    for place, other in enumerate(waiting):
        if numbers[other.request.client] > mine and not other.epoch:
            waiting.insert(place, state)
            return
        numbers[other.request.client] += 1
    waiting.append(state)


def has_room(waiting: Sequence[RequestState], client: int, limit: int) -> bool:
    """Whether one more may wait: below the limit anybody's, beyond it one of a client with less than its share."""
    if len(waiting) < limit:
        return True
    numbers = Counter(each.request.client for each in waiting)
    return numbers[client] < limit // len(numbers.keys() | {client})
