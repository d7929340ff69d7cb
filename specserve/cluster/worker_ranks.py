"""The processes of one worker, as its supervisor sees them: one, or the ranks of a tensor-parallel group.

They are loaded together and replaced together: when one is lost, what the others hold is of no use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from specserve.cluster.actors import WorkerState
from specserve.cluster.calls import CALL_TIMEOUT_S, or_none, result, state_of
from specserve.cluster.link import EchoAddress, Link
from specserve.errors import Unavailable
from specserve.models._ranks import Meeting
from specserve.transport.socket import Address
from specserve.types import WorkerInfo

_RENEWAL_S = 60.0
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class RanksState:
    """pids by rank; whether all are loaded and together; what the one that is behind does."""

    pids: tuple[int, ...]
    loaded: bool
    progress: str


class Held(Protocol):
    """A worker as its pipeline's supervisor sees it. Calls raise RayActorError where a process is gone, Unavailable."""

    own: bool
    """Whether the worker is this pipeline's alone; one that is not is brought back by others."""

    @property
    def handle(self) -> Any:
        """The actor to which the coordinator may make plain calls, where it may."""

    async def load(self) -> WorkerInfo: ...
    async def state(self) -> RanksState | None: ...
    async def state_or_kill(self) -> RanksState | None: ...
    async def returned(self) -> None: ...
    async def make_ready(self) -> None: ...
    async def connect(self, coordinator: Address | None, life: int) -> Address | None: ...
    async def leave(self) -> None: ...
    async def vocabulary(self) -> dict[str, int]: ...
    async def link_to(self, echo: EchoAddress) -> Link | None: ...
    async def links_between(self) -> list[Link | None]: ...
    def kill(self) -> None: ...
    def end(self) -> None: ...


class WorkerRanks:
    """Handles by rank; `lead` is the one that talks to the coordinator."""

    own = True

    def __init__(self, role: str, handles: Sequence[Any]) -> None:
        self.role = role
        self.handles = list(handles)

    @property
    def lead(self) -> Any:
        """Rank 0."""
        return self.handles[0]

    @property
    def handle(self) -> Any:
        """See `Held`."""
        return self.lead

    async def load(self) -> WorkerInfo:
        """Load in all processes, however long they take to start.

        Raises what the first of them fails with; the others may then wait for it in vain.
        """
        arguments: list[Meeting] = []
        if len(self.handles) > 1:
            arguments = [await result(self.lead.meet.remote())]
        infos: list[WorkerInfo] = await asyncio.gather(
            *(result(handle.load.remote(*arguments)) for handle in self.handles)
        )
        return infos[0]

    async def state(self) -> RanksState | None:
        """None while a process is away or does not answer."""
        return await self._state(lambda handle: or_none(handle.state.remote()))

    async def state_or_kill(self) -> RanksState | None:
        """As `state`, but a process that does not answer is killed, so that Ray starts it again."""
        return await self._state(state_of)

    async def _state(self, ask: Callable[[Any], Awaitable[Any]]) -> RanksState | None:
        states: list[WorkerState | None] = await asyncio.gather(*(ask(handle) for handle in self.handles))
        here = [state for state in states if state is not None]
        if len(here) < len(self.handles):
            return None
        behind = next((state for state in here if not state.loaded), here[0])
        return RanksState(tuple(state.pid for state in here), all(state.loaded for state in here), behind.progress)

    async def make_ready(self) -> None:
        """See to it that `load` can succeed: a process that is stuck, and every rank of a broken group, is replaced.

        Raises Unavailable when the new processes do not come.
        """
        state = await self.state_or_kill()
        if len(self.handles) > 1 and (state is None or not state.loaded):
            await self.renew()

    async def renew(self) -> None:
        """Replace every process that has begun to load. Raises Unavailable when the new ones do not come."""
        killed: set[int] = set()
        deadline_s = time.monotonic() + _RENEWAL_S
        while time.monotonic() < deadline_s:
            states: list[WorkerState | None] = await asyncio.gather(
                *(or_none(handle.state.remote()) for handle in self.handles)
            )
            if all(state is not None and state.fresh for state in states):
                return
            for handle, state in zip(self.handles, states, strict=True):
                if state is not None and not state.fresh and state.pid not in killed:
                    killed.add(state.pid)
                    ray.kill(handle, no_restart=False)
            await asyncio.sleep(_RETRY_S)
        raise Unavailable(f"the processes of the {self.role} worker did not come back within {_RENEWAL_S:g} s")

    async def returned(self) -> None:
        """Wait, for a while, until processes that died are there again, all of them as new."""
        if len(self.handles) > 1:
            await self.renew()
        deadline_s = time.monotonic() + CALL_TIMEOUT_S
        while await self.state() is None and time.monotonic() < deadline_s:
            await asyncio.sleep(_RETRY_S)

    async def connect(self, coordinator: Address | None, life: int) -> Address | None:
        """Begin a new life towards a coordinator; where it may send to."""
        return await result(self.lead.connect.remote(coordinator, life), CALL_TIMEOUT_S)

    async def leave(self) -> None:
        """End the present life."""
        await or_none(self.lead.disconnect.remote())

    async def vocabulary(self) -> dict[str, int]:
        """Every token of the loaded model's tokenizer with its id."""
        return await result(self.lead.vocabulary.remote(), CALL_TIMEOUT_S)

    async def link_to(self, echo: EchoAddress) -> Link | None:
        """How far the node of this echo is from rank 0; None when it is the same one."""
        return await result(self.lead.link_to.remote(echo), CALL_TIMEOUT_S)

    async def links_between(self) -> list[Link | None]:
        """How far rank 0 is from each of the others."""
        links: list[Link | None] = []
        for handle in self.handles[1:]:
            echo = await result(self.lead.echo.remote(), CALL_TIMEOUT_S)
            links.append(await result(handle.link_to.remote(echo), CALL_TIMEOUT_S))
        return links

    def kill(self) -> None:
        """End all processes; Ray starts them again."""
        for handle in self.handles:
            ray.kill(handle, no_restart=False)

    def end(self) -> None:
        """End all processes for good."""
        for handle in self.handles:
            ray.kill(handle, no_restart=True)
