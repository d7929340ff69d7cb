"""The Serve deployment that speaks HTTP: the FastAPI app of `api` on a `RoutingEngine`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Collection
from functools import partial
from typing import Any

from ray import serve

from specserve import config as configs
from specserve import logs
from specserve.api.app import create_app
from specserve.cluster.actors import node_address
from specserve.cluster.fleet import Fleet
from specserve.cluster.ingress_line import Welcome
from specserve.cluster.remote import Pipe, RemoteEngine
from specserve.cluster.replica_port import stay_at_the_node
from specserve.cluster.request_ids import NamedByProxy
from specserve.cluster.routing import Router
from specserve.cluster.routing_engine import RoutingEngine
from specserve.errors import Unavailable
from specserve.long_lived import made_to_last
from specserve.metrics import HttpMetrics, Snapshot
from specserve.models.loading import prepare
from specserve.sampling.grammar import Grammars
from specserve.text import Tokenizer
from specserve.tracing import Tracer
from specserve.transport.socket import Address
from specserve.types import Health

log = logging.getLogger(__name__)

_REPORT_S = 2.0


@serve.ingress()
class Ingress:
    """HTTP in front of all pipelines. Replicas are independent of each other."""

    def __init__(self, config_tree: dict[str, Any], pipelines: Any, ledger: Any) -> None:
        stay_at_the_node()
        self._config = configs.parse(config_tree)
        logs.configure(self._config.log_format)
        self._fleet = Fleet(pipelines)
        self._ledger = ledger
        self._engine: RoutingEngine | None = None
        self._place = f"ingress-{uuid.uuid4().hex}"
        self._reporting: asyncio.Task[None] | None = None
        self._tracer: Tracer | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve after the constructor. Waits until one pipeline serves."""
        node_id, host = node_address()
        holder = serve.get_replica_context().replica_id.to_full_id_str()

        def join(name: str) -> RemoteEngine:
            return RemoteEngine(self._config, self._pipe(name), host=host, node_id=node_id, holder=holder)

        cluster = self._config.cluster
        block_tokens = self._config.engine.block_tokens
        router = Router(cluster.routing, block_tokens=block_tokens, slack=cluster.routing_slack)
        self._engine = RoutingEngine(router, self._fleet.names, join)
        await self._fleet.any().name.remote()
        await self._engine.start()
        # The coordinator answered, so the target's folder is prepared at least on its node.
        with made_to_last():
            folder = await asyncio.to_thread(prepare, self._config.target, log.info)
            tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
            grammars = await asyncio.to_thread(Grammars, tokenizer)
            check = partial(grammars.check, max_bytes=self._config.server.max_schema_bytes)
            app = create_app(self._engine, tokenizer, self._config, check_structured=check)
        app.add_middleware(NamedByProxy)
        self._tracer = app.state.tracer
        self._reporting = asyncio.ensure_future(self._report(app.state.metrics))
        return app

    def _pipe(self, name: str) -> Pipe:
        pipeline = self._fleet.at(name)

        async def connect(ingress_id: str, address: Address, cursor: int) -> Welcome:
            answer: Welcome | None = await pipeline.connect_ingress.remote(ingress_id, address, cursor)
            if answer is None:
                raise Unavailable("the pipeline is starting")
            return answer

        async def health() -> Health:
            answer: Health = await pipeline.health.remote()
            return answer

        async def metrics(own: Snapshot) -> str:
            answer: str = await self._ledger.metrics.remote(self._place, own)
            return answer

        async def status() -> dict[str, Any]:
            answer: dict[str, Any] = await pipeline.status.remote()
            return answer

        async def timeline() -> dict[str, Any]:
            answer: dict[str, Any] = await pipeline.timeline.remote()
            return answer

        async def hold(name: str) -> None:
            await pipeline.hold.remote(name)

        async def release(names: Collection[str]) -> None:
            await pipeline.release.remote(names)

        return Pipe(connect, health, metrics, status, timeline, hold, release)

    async def _report(self, metrics: HttpMetrics) -> None:
        """Hand in what this replica counted, so that a scrape of any replica tells of all."""
        while True:
            with contextlib.suppress(Exception):  # a ledger that is being replaced hears of it the next time
                await self._ledger.report_metrics.remote(self._place, metrics.snapshot())
            await asyncio.sleep(_REPORT_S)

    async def __del__(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._engine is not None:
            self._engine.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
