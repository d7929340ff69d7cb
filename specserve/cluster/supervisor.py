"""Creates the actors of one pipeline, joins them, and brings back what dies. Runs on an asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specserve.cluster.actors import CONTROL, WORKER_ACTORS, WorkerState
from specserve.cluster.coordinator_actor import CoordinatorActor, CoordinatorState, Joined
from specserve.cluster.placement import COORDINATOR, DRAFT, TARGET, Placement
from specserve.config import Config, ModelConfig
from specserve.errors import ConfigError, SpecserveError, Unavailable
from specserve.models.threads import cpu_worker_environment
from specserve.models.vocabulary import require_same
from specserve.transport.socket import Address
from specserve.types import Health, ModelCard, WorkerInfo

log = logging.getLogger(__name__)

POLL_S = 0.25
_STATE_TIMEOUT_S = 10.0
_RETRY_S = 0.5
_STALL_S = 60.0

T = TypeVar("T")


@dataclass(slots=True)
class _Member:
    """One worker actor with its present life."""

    role: str
    handle: Any
    life: int = 0
    info: WorkerInfo | None = None
    pid: int = 0
    progress: str = "starting"
    recovery: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Stall:
    """When rounds last went on."""

    rounds: int = -1
    since_s: float = field(default_factory=time.monotonic)


class Supervisor:
    """Start with `start`, keep `watch` running, end with `stop`."""

    def __init__(self, config: Config, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._group: PlacementGroup | None = None
        self._coordinator: Any = None
        self._coordinator_pid = 0
        self._members: dict[str, _Member] = {}
        self._stall = _Stall()
        self._health = Health("starting", "creating processes")
        self._card: ModelCard | None = None
        self._recovering = False

    # ---- start --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Place, create, load and join everything. Raises ConfigError in words when that cannot succeed."""
        self._group = await self._place()
        self._coordinator = self._create(COORDINATOR, CoordinatorActor, {})
        for role in self._placement.roles:
            if role != COORDINATOR:
                self._members[role] = _Member(role, self._create_worker(role))
        await asyncio.gather(*(self._load(member) for member in self._members.values()))
        await self._check_vocabularies()
        await self._begin()

    async def _check_vocabularies(self) -> None:
        """The workers may live on different hosts, so their vocabularies are compared here, token by token."""
        if DRAFT in self._members:
            handles = [self._members[role].handle for role in (TARGET, DRAFT)]
            target, draft = await asyncio.gather(*(_result(handle.vocabulary.remote()) for handle in handles))
            require_same(target, draft, self._config.target.source, self._config.draft.model.source)

    async def _place(self) -> PlacementGroup:
        group = placement_group(list(self._placement.bundles), strategy=self._placement.strategy)
        timeout_s = self._config.cluster.start_timeout_s
        try:
            await asyncio.wait_for(_result(group.ready()), timeout_s)
        except TimeoutError:
            remove_placement_group(group)
            raise ConfigError(
                f"no room for the pipeline within {timeout_s:g} s: {self._placement.strategy} of "
                f"{list(self._placement.bundles)}; free resources now: {ray.available_resources()}"
            ) from None
        return group

    def _create(self, role: str, actor: Callable[..., Any], environment: dict[str, str]) -> Any:
        index = self._placement.index(role)
        bundle = self._placement.bundles[index]
        return (
            ray.remote(concurrency_groups={CONTROL: 2})(actor)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                runtime_env={"env_vars": environment},
            )
            .remote(*self._arguments(role))
        )

    def _create_worker(self, role: str) -> Any:
        model = self._model(role)
        environment = {} if self._placement.on_gpu(role) else cpu_worker_environment(model.threads or _all_cores())
        return self._create(role, WORKER_ACTORS[role], environment)

    def _model(self, role: str) -> ModelConfig:
        return self._config.target if role == TARGET else self._config.draft.model

    def _arguments(self, role: str) -> tuple[object, ...]:
        tree = self._config.model_dump()
        if role != COORDINATOR and self._placement.on_gpu(role):
            # Ray shows the process its own GPU only, under the first number.
            section = tree["target"] if role == TARGET else tree["draft"]["model"]
            section["device"] = "cuda"
        return (tree,)

    async def _load(self, member: _Member) -> None:
        loading = asyncio.ensure_future(_result(member.handle.load.remote()))
        while not loading.done():
            await asyncio.wait([loading], timeout=POLL_S)
            state = await self._worker_state(member)
            if state is not None:
                member.pid, member.progress = state.pid, state.progress
        member.info = await loading

    async def _begin(self) -> None:
        """Join the workers to an empty coordinator and let it serve."""
        life = 1 + max(member.life for member in self._members.values())
        for member in self._members.values():
            member.life = life
        joined = {role: await self._join(member) for role, member in self._members.items()}
        self._card = await _result(self._coordinator.start.remote(joined[TARGET], joined.get(DRAFT)))
        state: CoordinatorState = await _result(self._coordinator.state.remote())
        self._coordinator_pid, self._health = state.pid, state.health

    async def _join(self, member: _Member) -> Joined:
        address = await _result(self._coordinator.accept.remote(member.role, member.life))
        back: Address | None = await _result(member.handle.connect.remote(address, member.life))
        assert member.info is not None
        return Joined(member.info, member.life, back, member.handle)

    # ---- watch --------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Poll for ever; start a recovery for whatever is found lost."""
        while True:
            await asyncio.sleep(POLL_S)
            state = await self._coordinator_state()
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
                await self._watch_member(member, state)

    async def _watch_member(self, member: _Member, state: CoordinatorState) -> None:
        if member.recovery is not None and not member.recovery.done():
            return
        worker = await self._worker_state(member)
        if worker is not None:
            member.pid, member.progress = worker.pid, worker.progress
        if member.role in state.lost or worker is None or not worker.loaded:
            member.recovery = asyncio.create_task(self._recover(member))

    async def _recover(self, member: _Member) -> None:
        log.warning("the %s worker is lost; bringing it back", member.role)
        deadline_s = time.monotonic() + self._config.cluster.start_timeout_s
        while time.monotonic() < deadline_s:
            try:
                await self._load(member)
                member.life += 1
                joined = await self._join(member)
                await _result(self._coordinator.attach.remote(member.role, joined))
                log.warning("the %s worker is back (life %d)", member.role, member.life)
                return
            except (RayActorError, SpecserveError) as error:
                member.progress = f"restarting ({type(error).__name__})"
                await asyncio.sleep(_RETRY_S)
        raise Unavailable(f"the {member.role} worker did not come back")

    async def _recover_coordinator(self) -> None:
        log.warning("the coordinator is lost; bringing it back")
        self._health = Health("starting", "the coordinator is being restarted")
        self._recovering = True
        deadline_s = time.monotonic() + self._config.cluster.start_timeout_s
        while time.monotonic() < deadline_s:
            try:
                await asyncio.gather(*(self._load(member) for member in self._members.values()))
                await self._begin()
                self._recovering = False
                return
            except (RayActorError, SpecserveError):
                await asyncio.sleep(_RETRY_S)
        raise Unavailable("the coordinator did not come back")

    async def _coordinator_state(self) -> CoordinatorState | None:
        return await _or_none(self._coordinator.state.remote())

    async def _worker_state(self, member: _Member) -> WorkerState | None:
        return await _or_none(member.handle.state.remote())

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
        if not self._recovering and time.monotonic() - self._stall.since_s > _STALL_S:
            raise Unavailable(f"there is work, but no round ended for {_STALL_S:g} s")

    @property
    def health(self) -> Health:
        """As of the last poll."""
        return self._health

    @property
    def progress(self) -> dict[str, str]:
        """What each worker is doing."""
        return {role: member.progress for role, member in self._members.items()}

    @property
    def pids(self) -> dict[str, int]:
        """Processes by role."""
        return {COORDINATOR: self._coordinator_pid} | {role: member.pid for role, member in self._members.items()}

    async def connect_ingress(self, ingress_id: str, address: Address) -> tuple[Address, ModelCard]:
        """Hand an ingress on to the coordinator."""
        answer: tuple[Address, ModelCard] = await _result(self._coordinator.connect_ingress.remote(ingress_id, address))
        return answer

    async def metrics(self) -> str:
        """The coordinator's metrics."""
        text: str = await _result(self._coordinator.metrics.remote())
        return text

    async def drain(self) -> None:
        """Take no new requests."""
        await _result(self._coordinator.drain.remote())

    async def stop(self) -> None:
        """End the children and give the bundles back. Idempotent."""
        handles = [member.handle for member in self._members.values()]
        calls = [handle.disconnect.remote() for handle in handles]
        if self._coordinator is not None:
            handles.append(self._coordinator)
            calls.append(self._coordinator.stop.remote())
        await asyncio.gather(*(_or_none(call) for call in calls))
        for handle in handles:
            ray.kill(handle, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)
        self._members, self._coordinator, self._group = {}, None, None


async def _result(reference: Awaitable[T]) -> T:
    """The result of an actor call; an error that the actor raised on purpose comes as it was raised."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, SpecserveError):
            raise error.cause from None
        raise


async def _or_none(reference: Awaitable[T]) -> T | None:
    """The result, or None when the actor is away or does not answer."""
    try:
        return await asyncio.wait_for(_result(reference), _STATE_TIMEOUT_S)
    except (RayActorError, TimeoutError, SpecserveError):
        return None


def _all_cores() -> int:
    return max(1, int(max((node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"]), default=1)))
