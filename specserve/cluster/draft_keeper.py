"""The Serve deployment that keeps draft workers which several pipelines share. Tokens never pass through it.

A replica has one draft worker, whose process nobody else can reach by calls: pipelines lease shares of it here, by
name and for a while, and are joined to it from here. What one pipeline does can so never end the worker of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from specserve import config as configs
from specserve import logs
from specserve.cluster.calls import CALL_TIMEOUT_S, or_none, result
from specserve.cluster.link import EchoAddress, Link
from specserve.cluster.member import POLL_S, Member
from specserve.cluster.placement import DRAFT, Placement, plan_shared
from specserve.cluster.placing import Seats, place, planned
from specserve.cluster.replica_port import stay_at_the_node
from specserve.cluster.shared_draft_actor import SharedDraftActor
from specserve.config import Config
from specserve.errors import ConfigError, SpecserveError, Unavailable
from specserve.transport.socket import Address
from specserve.types import WorkerInfo

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""A share that is not asked for again within this time may be given to another pipeline."""

_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Lease:
    """What a pipeline has of a draft worker: what its share holds; what the worker's processes say of themselves.

    info is None while the worker loads, or is being replaced.
    """

    info: WorkerInfo | None
    pids: tuple[int, ...]
    progress: str


@dataclass(slots=True)
class _Tenant:
    """Who has a share, and how long that is certain."""

    name: str
    until_s: float


def kinship(config: Config) -> str:
    """A fingerprint of the settings that a pipeline and its draft worker must have in common."""
    tree = config.model_dump(
        include={"target": True, "draft": True, "engine": True, "cluster": {"pipelines_per_draft"}}
    )
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


class DraftKeeper:
    """Creates one draft worker as its child, brings it back, and gives shares of it to pipelines of its own kind."""

    def __init__(self, config_tree: dict[str, Any]) -> None:
        stay_at_the_node()
        self._config = configs.parse(config_tree)
        logs.configure(self._config.log_format)
        self._kinship = kinship(self._config)
        self._tenants: list[_Tenant | None] = [None] * self._config.cluster.pipelines_per_draft
        self._member: Member | None = None
        self._group: PlacementGroup | None = None
        self._failure: str | None = None
        self._loaded = False
        self._waiting = "placing the draft worker"
        self._life = asyncio.ensure_future(self._run())

    # ---- the worker ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            placement = await self._planned()
            self._group = await place(placement, self._config.cluster.start_timeout_s)
            ranks = Seats(self._config, placement, self._group).create_worker(DRAFT, SharedDraftActor)
            self._member = Member(DRAFT, ranks)
            await asyncio.wait_for(self._member.load_surviving(), self._config.cluster.start_timeout_s)
            self._loaded = True
            while True:
                await asyncio.sleep(POLL_S)
                await self._look(self._member)
        except TimeoutError:
            limit_s = self._config.cluster.start_timeout_s
            self._failure = f"the draft was not loaded within cluster.start_timeout_s = {limit_s:g} s"
        except ConfigError as error:
            self._failure = error.message
        except Exception as error:
            log.exception("the keeper of the draft worker failed")
            self._failure = f"{type(error).__name__}: {error}"

    async def _planned(self) -> Placement:
        def plan(nodes: Sequence[Mapping[str, float]]) -> Placement:
            return plan_shared(self._config, nodes)[1]

        return await planned(plan, self._config.cluster.wait_for_nodes_s, self._wait_for)

    def _wait_for(self, what: str) -> None:
        self._waiting = what

    async def _look(self, member: Member) -> None:
        """Bring the worker back if it is lost, end it if it hangs, and forget tenants that say nothing more."""
        state = await member.ranks.state_or_kill()
        if state is not None:
            member.note(state)
        if state is None or not state.loaded:
            await self._bring_back(member)
            return
        computing_s: float | None = await or_none(member.ranks.handle.computing_s.remote())
        if computing_s is not None and computing_s > self._config.engine.hang_after_s:
            log.warning("the draft worker hangs for %.0f s; its process is being replaced", computing_s)
            member.ranks.kill()
        now = time.monotonic()
        for share, tenant in enumerate(self._tenants):
            if tenant is not None and tenant.until_s < now:
                log.warning("pipeline %s says nothing more; its share of the draft worker is free", tenant.name)
                await self._vacate(share)

    async def _bring_back(self, member: Member) -> None:
        log.warning("the draft worker is lost; bringing it back")
        self._loaded = False
        member.life += 1
        try:
            await member.load_again(self._config.cluster.start_timeout_s)
            self._loaded = True
        except (RayActorError, SpecserveError) as error:
            member.progress = f"restarting ({type(error).__name__})"
            await asyncio.sleep(_RETRY_S)

    # ---- what pipelines ask -------------------------------------------------------------------------------------

    async def name(self) -> str:
        """The name under which `Fleet` finds this replica."""
        name: str = serve.get_replica_context().replica_id.unique_id
        return name

    async def check_health(self) -> None:
        """Serve replaces this replica when this raises. A start that failed would fail again; pipelines tell why."""
        if self._failure is not None and self._member is not None and self._member.info is not None:
            raise Unavailable(self._failure)

    async def free(self, kind: str) -> int:
        """Shares for pipelines of this kind that nobody has. Raises ConfigError when there will never be a worker."""
        if self._failure is not None:
            raise ConfigError(self._failure)
        return 0 if kind != self._kinship else self._tenants.count(None)

    async def lease(self, pipeline: str, kind: str) -> Lease | None:
        """A share for this pipeline, or its own for longer; None where there is none for it. Raises as `free`."""
        if self._failure is not None:
            raise ConfigError(self._failure)
        share = self._share_of(pipeline)
        if share is None and kind == self._kinship and None in self._tenants:
            share = self._tenants.index(None)
        if share is None:
            return None
        self._tenants[share] = _Tenant(pipeline, time.monotonic() + LEASE_S)
        if self._member is None:
            return Lease(None, (0,), self._waiting)
        taken = sum(tenant is not None for tenant in self._tenants)
        progress = f"{self._member.progress}, shared by {taken} of {len(self._tenants)} pipelines"
        return Lease(self._member.info if self._loaded else None, self._member.pids, progress)

    def _share_of(self, pipeline: str) -> int | None:
        names = [None if tenant is None else tenant.name for tenant in self._tenants]
        return names.index(pipeline) if pipeline in names else None

    async def join(self, pipeline: str, coordinator: Address, life: int) -> Address:
        """Begin a new life of the pipeline's share; where its coordinator may send to. Raises Unavailable."""
        share = self._share_of(pipeline)
        if share is None or self._member is None or not self._loaded:
            raise Unavailable("the share of the draft worker is gone, or the worker is being replaced")
        address: Address = await result(self._handle.seat.remote(share, coordinator, life), CALL_TIMEOUT_S)
        return address

    async def leave(self, pipeline: str) -> None:
        """This pipeline ends."""
        share = self._share_of(pipeline)
        if share is not None:
            await self._vacate(share)

    async def _vacate(self, share: int) -> None:
        if self._member is not None:
            await or_none(self._handle.unseat.remote(share))
        self._tenants[share] = None

    async def vocabulary(self) -> dict[str, int]:
        """Every token of the draft's tokenizer with its id. Raises Unavailable while there is no worker."""
        return await self._there.ranks.vocabulary()

    async def link_to(self, echo: EchoAddress) -> Link | None:
        """How far the node of this echo is from the worker's. Raises as `vocabulary`."""
        return await self._there.ranks.link_to(echo)

    @property
    def _there(self) -> Member:
        if self._member is None:
            raise Unavailable("the draft worker is starting")
        return self._member

    @property
    def _handle(self) -> Any:
        return self._there.ranks.handle

    # ---- ends ---------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End the worker and give its bundle back. Idempotent."""
        self._life.cancel()
        if self._member is not None:
            self._member.ranks.end()
        if self._group is not None:
            with contextlib.suppress(Exception):  # Ray itself may be ending
                remove_placement_group(self._group)
        self._member = self._group = None

    async def __del__(self) -> None:
        await self.stop()
