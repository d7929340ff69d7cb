"""Which requests wait for a place, as their owners know it: what waits cannot be what ends this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specserve.coordinator.requests import RequestState, Stage
from specserve.transport.messages import Places

PlaceSink = Callable[[str, Places], None]
"""Takes what one owner is to know."""


def to_nobody(owner: str, places: Places) -> None:
    """For an engine in the process of its owner: they end together."""
    del owner, places


class PlacesTold:
    """Tells owners what changes. A request that is admitted before anybody was told that it waits is not told of."""

    def __init__(self, sink: PlaceSink) -> None:
        self._sink = sink
        self._queued: list[RequestState] = []  # since the last admission

    def queued(self, state: RequestState) -> None:
        """It waits from now on, unless the next admission takes it."""
        self._queued.append(state)

    def admitted(self, states: Sequence[RequestState]) -> None:
        """These begin, and what was queued and is not among them waits. To be called before they begin."""
        if not states and not self._queued:
            return
        begun = [state for state in states if state.said_to_wait]
        queued, self._queued = self._queued, []
        waiting = [state for state in queued if state.stage is Stage.WAITING]
        for owner in dict.fromkeys(state.owner for state in (*waiting, *begun)):
            self._tell(owner, _of(owner, waiting), _of(owner, begun))

    def tell_all(self, owner: str, states: Sequence[RequestState]) -> None:
        """Say of all of an owner's requests where they stand."""
        waiting = [state for state in states if state.stage is Stage.WAITING]
        if states:
            self._tell(owner, waiting, [state for state in states if state.stage is not Stage.WAITING])

    def _tell(self, owner: str, waiting: Sequence[RequestState], begun: Sequence[RequestState]) -> None:
        for state in waiting:
            state.said_to_wait = True
        for state in begun:
            state.said_to_wait = False
        self._sink(owner, Places(_ids(waiting), _ids(begun)))


def _of(owner: str, states: Iterable[RequestState]) -> list[RequestState]:
    return [state for state in states if state.owner == owner]


def _ids(states: Iterable[RequestState]) -> tuple[str, ...]:
    return tuple(state.request.id for state in states)
