"""The Serve deployment that supervises one pipeline. Tokens never pass through it."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any

import ray

from specserve import config as configs
from specserve import drafting, logs
from specserve.cluster.ingress_line import Welcome
from specserve.cluster.placement import plan
from specserve.cluster.ray_metrics import Mirror
from specserve.cluster.supervisor import Supervisor
from specserve.config import Config
from specserve.errors import ConfigError, Unavailable
from specserve.metrics import Ledger, Snapshot
from specserve.metrics.ledger import COORDINATOR
from specserve.transport.socket import Address
from specserve.types import Health, RequestId

log = logging.getLogger(__name__)

_COLLECT_S = 2.0


@dataclass(frozen=True, slots=True)
class PipelineState:
    """What the launcher shows. `failure` says in words why the pipeline will never start.

    open_requests counts the calls by which Serve sees what the pipeline works on.
    """

    ready: bool
    progress: dict[str, str]
    failure: str | None
    pids: dict[str, int]
    health: Health
    open_requests: int


class Pipeline:
    """One replica is one pipeline: it creates coordinator and workers as its children and brings back what dies."""

    def __init__(self, config_tree: dict[str, Any]) -> None:
        self._config = configs.parse(config_tree)
        logs.configure(self._config.log_format)
        self._supervisor: Supervisor | None = None
        self._ready = asyncio.Event()
        self._stopped = asyncio.Event()
        self._open_requests = 0
        self._served = False
        self._failure: str | None = None
        self._ledger = Ledger(aliases=self._config.observe.vllm_aliases)
        self._life = asyncio.ensure_future(self._run())
        self._collecting = asyncio.ensure_future(self._collect())

    async def _run(self) -> None:
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            placement = plan(self._config, with_draft=_has_draft_worker(self._config), nodes=nodes)
            self._supervisor = Supervisor(self._config, placement)
            await self._supervisor.start()
            self._served = True
            self._ready.set()
            await self._supervisor.watch()
        except asyncio.CancelledError:
            raise
        except ConfigError as error:
            self._fail(error.message)
        except Exception as error:
            log.exception("the pipeline failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, text: str) -> None:
        self._failure = text
        self._ready.set()

    async def state(self) -> PipelineState:
        """Cheap, never raises."""
        supervisor = self._supervisor
        return PipelineState(
            ready=self._ready.is_set() and self._failure is None,
            progress={} if supervisor is None else supervisor.progress,
            failure=self._failure,
            pids={"pipeline": os.getpid()} | ({} if supervisor is None else supervisor.pids),
            health=await self.health(),
            open_requests=self._open_requests,
        )

    async def health(self) -> Health:
        """As of the supervisor's last poll."""
        if self._failure is not None:
            return Health("dead", self._failure)
        if self._supervisor is None:
            return Health("starting", "placing the pipeline")
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

    async def connect_ingress(self, name: str, address: Address, cursor: int) -> Welcome:
        """Wait until the pipeline serves, then open the way for one ingress. Raises Unavailable."""
        return await (await self._serving()).connect_ingress(name, address, cursor)

    async def hold(self, request_id: RequestId) -> None:
        """Under way while a request is open, until the ingress cancels it: so Serve sees what this pipeline works on.

        Tokens do not pass here, and a request whose call fails goes on.
        """
        del request_id
        self._open_requests += 1
        try:
            await self._stopped.wait()
        finally:
            self._open_requests -= 1

    async def report_metrics(self, place: str, snapshot: Snapshot) -> None:
        """An ingress hands in its samples; every so often, and with each scrape."""
        self._ledger.take(place, snapshot)

    async def metrics(self, place: str, snapshot: Snapshot) -> str:
        """Prometheus text of all processes; of a coordinator that is away, what it said last."""
        self._ledger.take(place, snapshot)
        await self._ask_coordinator()
        return self._ledger.render()

    async def _ask_coordinator(self) -> None:
        snapshot = None if self._supervisor is None else await self._supervisor.metrics()
        if snapshot is not None:
            self._ledger.take(COORDINATOR, snapshot)

    async def _collect(self) -> None:
        """What a coordinator counted since the last look is lost when it dies: look often."""
        mirror = Mirror() if self._config.observe.ray_metrics else None
        while True:
            await asyncio.sleep(_COLLECT_S)
            await self._ask_coordinator()
            if mirror is not None:
                mirror.show(self._ledger.values())

    async def status(self) -> dict[str, Any]:
        """What the status page shows."""
        return await (await self._serving()).status()

    async def timeline(self) -> dict[str, Any]:
        """The last rounds as a trace."""
        return await (await self._serving()).timeline()

    async def drain(self) -> None:
        """Take no new requests; those admitted go on."""
        await (await self._serving()).drain()

    async def stop(self) -> None:
        """End the children. Idempotent."""
        self._stopped.set()
        self._life.cancel()
        self._collecting.cancel()
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            await supervisor.stop()

    async def _serving(self) -> Supervisor:
        await self._ready.wait()
        if self._failure is not None or self._supervisor is None:
            raise Unavailable(self._failure or "the pipeline is stopped")
        return self._supervisor

    async def __del__(self) -> None:
        await self.stop()


def _has_draft_worker(config: Config) -> bool:
    return config.engine.depth > 0 and drafting.has_worker(config.draft)
