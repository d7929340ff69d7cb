"""The Serve deployment that supervises one pipeline. Tokens never pass through it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve

from specserve import config as configs
from specserve import logs
from specserve.cluster.holds import Holds
from specserve.cluster.ingress_line import Welcome
from specserve.cluster.leased_draft import Keepers, LeasedDraft, ServedKeepers
from specserve.cluster.placement import Placement, has_draft_worker, plan, plan_shared
from specserve.cluster.placing import planned
from specserve.cluster.replica_port import stay_at_the_node
from specserve.cluster.scaling import LOAD
from specserve.cluster.supervisor import Supervisor
from specserve.errors import ConfigError, Unavailable
from specserve.metrics import Snapshot
from specserve.transport.socket import Address
from specserve.types import Health

log = logging.getLogger(__name__)

_DRAIN_LOOK_S = 0.25
_SERVE_NAMESPACE = "serve"


@dataclass(frozen=True, slots=True)
class PipelineState:
    """What the launcher shows. `failure` says in words why the pipeline will never start, `warnings` what is slow.

    keeper names the keeper of the draft worker that this pipeline shares, where it has a share.
    """

    ready: bool
    progress: dict[str, str]
    failure: str | None
    pids: dict[str, int]
    health: Health
    warnings: tuple[str, ...] = ()
    keeper: str | None = None


class Pipeline:
    """One replica is one pipeline: it creates coordinator and workers as its children and brings back what dies."""

    def __init__(self, config_tree: dict[str, Any], keepers: Keepers | None = None) -> None:
        """keepers have the draft workers that this pipeline shares with others; without them it has one of its own."""
        self._config = configs.parse(config_tree)
        logs.configure(self._config.log_format)
        self._shared_draft = None if keepers is None else LeasedDraft(self._config, keepers)
        self._supervisor: Supervisor | None = None
        self._ready = asyncio.Event()
        self._holds = Holds(_dead)
        self._served = False
        self._failure: str | None = None
        self._waiting = "placing the pipeline"
        self._life = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            self._supervisor = Supervisor(self._config, await self._planned(), self._shared_draft)
            await self._supervisor.start()
            self._served = True
            self._ready.set()
            await self._supervisor.watch()
        except ConfigError as error:
            self._fail(error.message)
        except Exception as error:
            log.exception("the pipeline failed")
            self._fail(f"{type(error).__name__}: {error}")

    async def _planned(self) -> Placement:
        return await planned(self._plan, self._config.cluster.wait_for_nodes_s, self._wait_for)

    def _plan(self, nodes: Sequence[Mapping[str, float]]) -> Placement:
        if self._shared_draft is not None:
            return plan_shared(self._config, nodes)[0]
        return plan(self._config, with_draft=has_draft_worker(self._config), nodes=nodes)

    def _wait_for(self, what: str) -> None:
        self._waiting = what

    def _fail(self, text: str) -> None:
        self._failure = text
        self._ready.set()

    async def state(self) -> PipelineState:
        """Cheap, never raises."""
        supervisor = self._supervisor
        return PipelineState(
            ready=self._served and self._failure is None,
            progress={} if supervisor is None else supervisor.progress,
            failure=self._failure,
            pids={"pipeline": os.getpid()} | ({} if supervisor is None else supervisor.pids),
            health=await self.health(),
            warnings=() if supervisor is None else supervisor.warnings,
            keeper=None if self._shared_draft is None else self._shared_draft.keeper,
        )

    async def health(self) -> Health:
        """As the supervisor heard last."""
        if self._failure is not None:
            return Health("dead", self._failure)
        if self._supervisor is None:
            return Health("starting", self._waiting)
        return self._supervisor.health

    async def check_health(self) -> None:
        """Serve replaces this replica, and with it the whole pipeline, when this raises."""
        # A start that failed would fail again; the launcher and the ingress tell why.
        if not self._served:
            return
        if self._failure is not None:
            raise Unavailable(self._failure)
        if self._supervisor is not None:
            self._supervisor.check()

    async def connect_ingress(self, ingress_id: str, address: Address, cursor: int) -> Welcome | None:
        """Open the way for one ingress; None while the pipeline starts. Raises Unavailable.

        It does not wait: Serve would wait for it when this replica ends. Nor does it raise where there is nothing
        wrong: Serve would log each try with its traceback.
        """
        if not self._ready.is_set():
            return None
        return await (await self._serving()).connect_ingress(ingress_id, address, cursor)

    async def hold(self, name: str) -> None:
        """Under way while a request is open, so that Serve sees what this pipeline works on; see `holds`."""
        await self._holds.hold(name)

    async def release(self, names: Collection[str]) -> None:
        """These requests have ended."""
        self._holds.release(names)

    async def name(self) -> str:
        """The name under which `Fleet` finds this replica."""
        name: str = serve.get_replica_context().replica_id.unique_id
        return name

    async def snapshot(self) -> Snapshot | None:
        """The coordinator's samples; None while there is none."""
        return None if self._supervisor is None else await self._supervisor.metrics()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve where pipelines are scaled."""
        health = await self.health()
        return {LOAD: float(health.running + health.waiting)}

    async def status(self) -> dict[str, Any]:
        """What the status page shows."""
        return await (await self._serving()).status()

    async def timeline(self) -> dict[str, Any]:
        """The last rounds as a trace."""
        return await (await self._serving()).timeline()

    async def drain(self) -> None:
        """Take no new requests; those admitted go on."""
        await (await self._serving()).drain()

    async def open_requests(self) -> int:
        """Sequences that run or wait, asked for now. Raises while the coordinator is away."""
        return 0 if self._supervisor is None else await self._supervisor.open_requests()

    async def stop(self) -> None:
        """End the children. Idempotent."""
        self._holds.close()
        self._life.cancel()
        self._ready.set()  # nobody is to wait for what will not come
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            await supervisor.stop()

    async def _serving(self) -> Supervisor:
        await self._ready.wait()
        if self._failure is not None or self._supervisor is None:
            raise Unavailable(self._failure or "the pipeline is stopped")
        return self._supervisor

    async def _finish(self) -> None:
        """Take no new requests, and wait for those admitted. Serve ends the wait, and all of this, at its limit."""
        if self._supervisor is None or not self._served or self._failure is not None:
            return
        with contextlib.suppress(Exception):  # a pipeline that cannot drain has nothing to wait for
            await self._supervisor.drain()
            while await self.open_requests():
                await asyncio.sleep(_DRAIN_LOOK_S)

    async def __del__(self) -> None:
        await self._finish()
        await self.stop()


class ServedPipeline(Pipeline):
    """A pipeline as a replica of Serve, which counts it as running when the constructor has returned.

    One that joins others, in an update or to scale up, has returned only when it serves, and raises where it never
    will: until then nobody makes way for it. Where there is no other the constructor returns at once, so that the
    launcher can ask how far the start is, and why it failed.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config_tree: dict[str, Any], drafts: Any = None
    ) -> None:
        """drafts is the handle of the keepers' deployment, where there is one."""
        stay_at_the_node()
        super().__init__(config_tree, None if drafts is None else ServedKeepers(drafts))
        if await asyncio.to_thread(_others_run):
            try:
                await self._serving()
            except Unavailable:
                await self.stop()
                raise


async def _dead(replica: str) -> bool:
    """Whether the replica of Serve with this name is dead: Ray forgets the names of those that are."""
    try:
        await asyncio.to_thread(ray.get_actor, replica, _SERVE_NAMESPACE)
    except ValueError:
        return True
    except Exception as error:  # whatever the control plane says, a later look may tell
        log.info("nobody knows whether %s is dead: %s", replica, error)
    return False


def _others_run() -> bool:
    me = serve.get_replica_context()
    deployment = serve.status().applications[me.app_name].deployments[me.deployment]
    return bool(deployment.replica_states.get("RUNNING", 0))
