"""Creates the actors of one pipeline, joins them, and brings back what dies. Runs on an asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from specserve.cluster.actors import WORKER_ACTORS
from specserve.cluster.calls import CALL_TIMEOUT_S, or_none, result, state_of
from specserve.cluster.coordinator_actor import NEWS_S, CoordinatorActor, CoordinatorState, Joined
from specserve.cluster.ingress_line import Welcome
from specserve.cluster.member import Member
from specserve.cluster.placement import COORDINATOR, DRAFT, TARGET, Placement, rank_name
from specserve.cluster.placing import Seats, place
from specserve.cluster.worker_ranks import Held
from specserve.config import Config
from specserve.errors import ConfigError, SpecserveError, Unavailable
from specserve.metrics import Snapshot
from specserve.models.vocabulary import require_same
from specserve.transport.socket import Address
from specserve.types import Health, ModelCard

log = logging.getLogger(__name__)

_PAUSE_S = 0.05  # between two answers of a coordinator that has news each time
_RETRY_S = 0.5
_STALL_PATIENCE = 2.0  # times engine.hang_after_s, after which a worker that hangs was to be replaced
_STALL_NEWS = 3.0  # answers of the coordinator that this takes at least: progress is known from them
_GROUP_SLOW_SHARE = 0.1  # of cluster.slow_link_s: ranks cross their link twice in every layer


@dataclass(slots=True)
class _Stall:
    """When rounds last went on."""

    rounds: int = -1
    since_s: float = field(default_factory=time.monotonic)


class Supervisor:
    """Start with `start`, keep `watch` running, end with `stop`."""

    def __init__(self, config: Config, placement: Placement, shared_draft: Held | None = None) -> None:
        """shared_draft is a draft worker that is not among the placement's."""
        self._config = config
        self._shared_draft = shared_draft
        self._placement = placement
        self._group: PlacementGroup | None = None
        self._coordinator: Any = None
        self._coordinator_pid = 0
        self._members: dict[str, Member] = {}
        self._stall = _Stall()
        self._health = Health("starting", "creating processes")
        self._card: ModelCard | None = None
        self._recovering = False
        self._ended = False
        self._warnings: list[str] = []

    # ---- start --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Place, create, load and join everything. Raises ConfigError in words when that cannot succeed."""
        self._group = await place(self._placement, self._config.cluster.start_timeout_s)
        seats = Seats(self._config, self._placement, self._group)
        self._coordinator = seats.create(COORDINATOR, CoordinatorActor, {})
        for role in self._placement.workers:
            self._members[role] = Member(role, seats.create_worker(role, WORKER_ACTORS[role]))
        if self._shared_draft is not None:
            self._members[DRAFT] = Member(DRAFT, self._shared_draft)
        await self._load_first()
        await self._check_vocabularies()
        await self._begin()
        await self._measure_links()

    async def _measure_links(self) -> None:
        """Warn of a worker that is far from the coordinator. What cannot be measured does not keep anything waiting."""
        for member in self._members.values():
            try:
                link = await member.ranks.link_to(await result(self._coordinator.echo.remote(), CALL_TIMEOUT_S))
                between = await member.ranks.links_between()
            except (RayActorError, SpecserveError) as error:
                log.warning("the way to the %s worker was not measured: %s", member.role, error)
                continue
            if link is not None:
                log.info("%s worker: %.3f ms to the coordinator", member.role, 1000 * link.round_trip_s)
                self._warn(link.warning(member.role, self._config.cluster.slow_link_s))
            for rank, way in enumerate(between, 1):
                if way is not None:
                    slow_s = _GROUP_SLOW_SHARE * self._config.cluster.slow_link_s
                    self._warn(way.warning_of_rank(rank_name(member.role, rank), slow_s))

    def _warn(self, text: str | None) -> None:
        if text is not None:
            log.warning("%s", text)
            self._warnings.append(text)

    async def _load_first(self) -> None:
        timeout_s = self._config.cluster.start_timeout_s
        loads = asyncio.gather(*(member.load_surviving() for member in self._members.values()))
        try:
            await asyncio.wait_for(loads, timeout_s)
        except TimeoutError:
            raise ConfigError(f"the models were not loaded within cluster.start_timeout_s = {timeout_s:g} s") from None

    async def _check_vocabularies(self) -> None:
        """The workers may live on different hosts, so their vocabularies are compared here, token by token."""
        if DRAFT in self._members:
            calls = [self._members[role].ranks.vocabulary() for role in (TARGET, DRAFT)]
            target, draft = await asyncio.gather(*calls)
            require_same(target, draft, self._config.target.source, self._config.draft.model.source)

    async def _begin(self) -> None:
        """Join the workers to an empty coordinator and let it serve."""
        life = 1 + max(member.life for member in self._members.values())
        for member in self._members.values():
            member.life = life
        joined = {role: await self._join(member) for role, member in self._members.items()}
        start = self._coordinator.start.remote(joined[TARGET], joined.get(DRAFT))
        self._card = await result(start, self._config.cluster.start_timeout_s)
        state: CoordinatorState = await result(self._coordinator.state.remote(), CALL_TIMEOUT_S)
        self._coordinator_pid, self._health = state.pid, state.health
        # Nothing could go on while there was nothing to serve with.
        self._stall = _Stall()

    async def _join(self, member: Member) -> Joined:
        address = await result(self._coordinator.accept.remote(member.role, member.life), CALL_TIMEOUT_S)
        back = await member.ranks.connect(address, member.life)
        assert member.info is not None
        return Joined(member.info, member.life, back, member.ranks.handle)

    # ---- watch --------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Ask for news until the end; start a recovery for whatever is found lost."""
        state: CoordinatorState | None = None
        while True:
            await asyncio.sleep(_PAUSE_S)
            asked_s = time.monotonic()
            state = None if self._ended else await state_of(self._coordinator, state)
            if self._ended:  # what is being ended is not lost
                return
            if state is not None and state.health.status == "dead":
                # Its books are void; a fresh process starts with empty ones.
                ray.kill(self._coordinator, no_restart=False)
                state = None
            if state is None or not state.started:
                await self._recover_coordinator()
                continue
            self._health = state.health
            self._note_progress(state)
            for member in self._members.values():
                if asked_s >= member.back_s:  # else the answer may be of its life before
                    self._watch_member(member, state)

    def _watch_member(self, member: Member, state: CoordinatorState) -> None:
        """Without waiting: a worker that is stuck must not keep the coordinator from being watched."""
        if member.recovering:
            return
        if member.role in state.hung and member.ranks.own:
            log.warning("the %s worker does not do what it is asked; its process is being replaced", member.role)
            member.ranks.kill()
        if member.role in state.lost:
            member.recovery = asyncio.create_task(self._recover(member))
        elif member.look is None:
            member.look = asyncio.create_task(self._look(member))
        elif member.look.done():
            member.look.result()
            member.look = None  # the next news are the time for the next look

    async def _look(self, member: Member) -> None:
        worker = await member.ranks.state_or_kill()
        if worker is not None:
            member.note(worker)
        if not member.ranks.own:  # only the coordinator knows whether its share of it is lost
            return
        if (worker is None or not worker.loaded) and not (member.recovering or self._recovering):
            member.recovery = asyncio.create_task(self._recover(member))

    async def _recover(self, member: Member) -> None:
        log.warning("the %s worker is lost; bringing it back", member.role)
        timeout_s = self._config.cluster.start_timeout_s
        deadline_s = time.monotonic() + timeout_s
        # Without a draft worker that others bring back the pipeline serves, and could not be replaced by a better one.
        while not member.ranks.own or time.monotonic() < deadline_s:
            try:
                await member.load_again(timeout_s)
                member.life += 1
                joined = await self._join(member)
                await result(self._coordinator.attach.remote(member.role, joined), CALL_TIMEOUT_S)
                log.warning("the %s worker is back (life %d)", member.role, member.life)
                member.back_s = time.monotonic()
                return
            except (RayActorError, SpecserveError) as error:
                member.progress = f"restarting ({type(error).__name__})"
                await asyncio.sleep(_RETRY_S)
        raise Unavailable(f"the {member.role} worker did not come back")

    async def _recover_coordinator(self) -> None:
        log.warning("the coordinator is lost; bringing it back")
        self._health = Health("starting", "the coordinator is being restarted")
        self._recovering = True
        self._cancel_tasks()  # every worker is joined anew below
        timeout_s = self._config.cluster.start_timeout_s
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            try:
                await asyncio.gather(*(member.load_again(timeout_s) for member in self._members.values()))
                await self._begin()
                self._recovering = False
                return
            except (RayActorError, SpecserveError):
                await asyncio.sleep(_RETRY_S)
                await state_of(self._coordinator)
        raise Unavailable("the coordinator did not come back")

    def _cancel_tasks(self) -> None:
        for member in self._members.values():
            member.cancel()

    def _note_progress(self, state: CoordinatorState) -> None:
        idle = state.health.running == 0 or any(
            member.recovery is not None and not member.recovery.done() for member in self._members.values()
        )
        if idle or state.rounds != self._stall.rounds or self._config.cluster.transport == "ray":
            self._stall = _Stall(state.rounds)

    # ---- what the pipeline asks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise Unavailable when nothing here will get better by itself."""
        for member in self._members.values():
            if member.recovery is not None and member.recovery.done():
                member.recovery.result()
        longest_s = max(_STALL_PATIENCE * self._config.engine.hang_after_s, _STALL_NEWS * NEWS_S)
        if not self._recovering and time.monotonic() - self._stall.since_s > longest_s:
            raise Unavailable(f"there is work, but no round ended for {longest_s:g} s")

    @property
    def health(self) -> Health:
        """As of the last answer of the coordinator."""
        return self._health

    @property
    def warnings(self) -> tuple[str, ...]:
        """What people should know about how this pipeline is placed."""
        return tuple(self._warnings)

    @property
    def progress(self) -> dict[str, str]:
        """What each worker is doing."""
        return {role: member.progress for role, member in self._members.items()}

    @property
    def pids(self) -> dict[str, int]:
        """Processes by role; of a worker with several ranks each is named."""
        return {COORDINATOR: self._coordinator_pid} | {
            rank_name(role, rank): pid for role, member in self._members.items() for rank, pid in enumerate(member.pids)
        }

    async def connect_ingress(self, name: str, address: Address, cursor: int) -> Welcome:
        """Hand an ingress on to the coordinator."""
        call = self._coordinator.connect_ingress.remote(name, address, cursor)
        welcome: Welcome = await result(call, CALL_TIMEOUT_S)
        return welcome

    async def metrics(self) -> Snapshot | None:
        """The coordinator's samples; None while it is away."""
        snapshot: Snapshot | None = await or_none(self._coordinator.metrics.remote())
        return snapshot

    async def status(self) -> dict[str, Any]:
        """What the coordinator tells the status page."""
        status: dict[str, Any] = await result(self._coordinator.status.remote(), CALL_TIMEOUT_S)
        return status

    async def timeline(self) -> dict[str, Any]:
        """The last rounds as a trace."""
        trace: dict[str, Any] = await result(self._coordinator.timeline.remote(), CALL_TIMEOUT_S)
        return trace

    async def drain(self) -> None:
        """Take no new requests."""
        await result(self._coordinator.drain.remote(), CALL_TIMEOUT_S)

    async def open_requests(self) -> int:
        """Sequences that run or wait, asked for now. Raises while the coordinator is away."""
        state: CoordinatorState = await result(self._coordinator.state.remote(), CALL_TIMEOUT_S)
        return state.health.running + state.health.waiting

    async def stop(self) -> None:
        """End the children and give the bundles back. Idempotent."""
        self._ended = True
        self._cancel_tasks()
        calls = [member.ranks.leave() for member in self._members.values()]
        if self._coordinator is not None:
            calls.append(or_none(self._coordinator.stop.remote()))
        await asyncio.gather(*calls)
        for member in self._members.values():
            member.ranks.end()
        if self._coordinator is not None:
            ray.kill(self._coordinator, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)
        self._members, self._coordinator, self._group = {}, None, None
