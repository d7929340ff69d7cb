"""One worker of a pipeline with its present life, and how it is loaded."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from ray.exceptions import RayActorError

from specserve.cluster.worker_ranks import Held, RanksState
from specserve.errors import ConfigError, GroupLost, Unavailable
from specserve.types import WorkerInfo

log = logging.getLogger(__name__)

POLL_S = 0.25
_FIRST_LOADS = 3


@dataclass(slots=True)
class Member:
    """A worker, what it said of itself last, and what is under way for it."""

    role: str
    ranks: Held
    life: int = 0
    info: WorkerInfo | None = None
    pids: tuple[int, ...] = (0,)
    progress: str = "starting"
    look: asyncio.Task[None] | None = None
    recovery: asyncio.Task[None] | None = None
    back_s: float = 0.0  # when it came back last

    def note(self, state: RanksState) -> None:
        """What the processes said of themselves."""
        self.pids, self.progress = state.pids, state.progress

    @property
    def recovering(self) -> bool:
        """A recovery that failed counts: it is not tried again, all of the pipeline is replaced."""
        return self.recovery is not None and (not self.recovery.done() or self.recovery.exception() is not None)

    async def load(self) -> None:
        """Load the model, or wait for who does, and note meanwhile how far that is."""
        loading = asyncio.ensure_future(self.ranks.load())
        try:
            while not loading.done():
                await asyncio.wait([loading], timeout=POLL_S)
                state = await self.ranks.state()
                if state is not None:
                    self.note(state)
            self.info = await loading
        finally:
            loading.cancel()

    async def load_surviving(self) -> None:
        """Load, again if the process dies meanwhile. Raises ConfigError when it always does."""
        for _ in range(_FIRST_LOADS):
            try:
                await self.load()
                return
            except (RayActorError, GroupLost) as error:
                log.warning("the %s worker died while loading: %s", self.role, error)
                self.progress = "restarting after its process died"
            await self.ranks.returned()
        raise ConfigError(f"the {self.role} worker died while loading, {_FIRST_LOADS} times (out of memory?)")

    async def load_again(self, timeout_s: float) -> None:
        """Load in a process that may be stuck, which is then replaced. A process that only paused keeps its model.

        Raises Unavailable when that takes longer.
        """
        await self.ranks.make_ready()
        try:
            await asyncio.wait_for(self.load(), timeout_s)
        except TimeoutError:
            raise Unavailable(f"the {self.role} worker did not load within {timeout_s:g} s") from None

    def cancel(self) -> None:
        """Leave off what is under way."""
        if self.look is not None:
            self.look.cancel()
            self.look = None
        if self.recovery is not None and not self.recovery.done():
            self.recovery.cancel()
            self.recovery = None
