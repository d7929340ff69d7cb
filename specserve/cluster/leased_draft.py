"""A share of a draft worker that other pipelines draft with, too, as its pipeline's supervisor sees it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from ray.exceptions import RayActorError

from specserve.cluster.calls import CALL_TIMEOUT_S, result
from specserve.cluster.draft_keeper import Lease, kinship
from specserve.cluster.fleet import Fleet
from specserve.cluster.link import EchoAddress, Link
from specserve.cluster.worker_ranks import RanksState
from specserve.config import Config
from specserve.errors import ConfigError, SpecserveError, Unavailable
from specserve.transport.socket import Address
from specserve.types import WorkerInfo

_ASK_S = 5.0
_RENEW_S = 1.0
_RETRY_S = 0.5


class Keepers(Protocol):
    """The keepers of draft workers that run now (`DraftKeeper`)."""

    async def names(self) -> Sequence[str]:
        """Those that may be asked."""
        ...

    async def ask(self, name: str, method: str, *arguments: object, timeout_s: float) -> Any:
        """Call a method. Raises what it raises, and RayActorError or Unavailable when there is no answer."""
        ...


class ServedKeepers:
    """Keepers that are replicas of Serve."""

    def __init__(self, handle: Any) -> None:
        self._fleet = Fleet(handle)

    async def names(self) -> Sequence[str]:
        """See `Keepers`."""
        return self._fleet.names() or [await result(self._fleet.any().name.remote(), _ASK_S)]

    async def ask(self, name: str, method: str, *arguments: object, timeout_s: float) -> Any:
        """See `Keepers`."""
        return await result(getattr(self._fleet.at(name), method).remote(*arguments), timeout_s)


class LeasedDraft:
    """Leases a share wherever there is one, and holds it for as long as it is asked for its state.

    It brings nothing back and ends nothing: that is the keeper's, for all who share the worker.
    """

    own = False
    handle = None

    def __init__(self, config: Config, keepers: Keepers) -> None:
        self._kind = kinship(config)
        self._keepers = keepers
        self._me = uuid.uuid4().hex
        self._keeper: str | None = None
        self._lease: Lease | None = None
        self._renewed_s = 0.0
        self._renewing = asyncio.Lock()

    @property
    def keeper(self) -> str | None:
        """Who has the worker that this is a share of; None while there is no share."""
        return self._keeper

    async def load(self) -> WorkerInfo:
        """Wait until there is a share of a worker that is loaded. Raises ConfigError where there will be none."""
        while True:
            await self._renew(0.0)
            if self._lease is not None and self._lease.info is not None:
                return self._lease.info
            await asyncio.sleep(_RETRY_S)

    async def state(self) -> RanksState | None:
        """Of the worker's processes; None while there is no share of any."""
        await self._renew(_RENEW_S)
        if self._lease is None:
            return None
        return RanksState(self._lease.pids, self._lease.info is not None, self._lease.progress)

    async def state_or_kill(self) -> RanksState | None:
        """As `state`."""
        try:
            return await self.state()
        except ConfigError:  # there will be no worker: nothing that this pipeline could do
            return None

    async def _renew(self, every_s: float) -> None:
        """Hold the lease, or find one. Raises ConfigError where a keeper says that there will never be a worker."""
        async with self._renewing:
            if time.monotonic() < self._renewed_s + every_s:
                return
            try:
                self._lease = await self._leased()
            except ConfigError:
                self._keeper = self._lease = None
                raise
            except (RayActorError, SpecserveError):  # it may only be busy: another one is taken when it is gone
                self._lease = None
            self._renewed_s = time.monotonic()

    async def _leased(self) -> Lease | None:
        names = await self._keepers.names()
        if self._keeper not in names:
            self._keeper = await self._with_room(names)
        if self._keeper is None:
            return None
        lease: Lease | None = await self._ask("lease", self._me, self._kind)
        if lease is None:
            self._keeper = None
        return lease

    async def _with_room(self, names: Sequence[str]) -> str | None:
        """The keeper with the most shares that nobody has."""
        best, most = None, 0
        for name in names:
            free = await self._keepers.ask(name, "free", self._kind, timeout_s=_ASK_S)
            if free > most:
                best, most = name, free
        return best

    async def _ask(self, method: str, *arguments: object, timeout_s: float = _ASK_S) -> Any:
        if self._keeper is None:
            raise Unavailable("there is no share of a draft worker for this pipeline now")
        return await self._keepers.ask(self._keeper, method, *arguments, timeout_s=timeout_s)

    async def returned(self) -> None:
        """Its keeper sees to that."""

    async def make_ready(self) -> None:
        """Its keeper sees to that."""

    async def connect(self, coordinator: Address | None, life: int) -> Address | None:
        """See `Held`."""
        address: Address = await self._ask("join", self._me, coordinator, life, timeout_s=CALL_TIMEOUT_S)
        return address

    async def leave(self) -> None:
        """Give the share back."""
        try:
            await self._ask("leave", self._me)
        except (RayActorError, SpecserveError):  # it is gone, or will be missed there
            return

    async def vocabulary(self) -> dict[str, int]:
        """See `Held`."""
        tokens: dict[str, int] = await self._ask("vocabulary", timeout_s=CALL_TIMEOUT_S)
        return tokens

    async def link_to(self, echo: EchoAddress) -> Link | None:
        """See `Held`."""
        link: Link | None = await self._ask("link_to", echo, timeout_s=CALL_TIMEOUT_S)
        return link

    async def links_between(self) -> list[Link | None]:
        """Those of the worker's ranks are not this pipeline's."""
        return []

    def kill(self) -> None:
        """Others draft with it: whether it hangs is its keeper's to judge."""

    def end(self) -> None:
        """It goes on for the others."""
