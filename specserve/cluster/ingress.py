"""The Serve deployment that speaks HTTP: the FastAPI app of `api` on a `RemoteEngine`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from functools import partial
from typing import Any

from ray import serve

from specserve import config as configs
from specserve import logs
from specserve.api.app import create_app
from specserve.cluster.actors import node_address
from specserve.cluster.ingress_line import Welcome
from specserve.cluster.remote import Pipe, RemoteEngine
from specserve.metrics import HttpMetrics, Snapshot
from specserve.models.loading import prepare
from specserve.sampling.grammar import Grammars
from specserve.text import Tokenizer
from specserve.tracing import Tracer
from specserve.transport.socket import Address
from specserve.types import Health, RequestId

log = logging.getLogger(__name__)

_REPORT_S = 1.0


@serve.ingress()
class Ingress:
    """HTTP in front of one pipeline. Replicas are independent of each other."""

    def __init__(self, config_tree: dict[str, Any], pipeline: Any) -> None:
        self._config = configs.parse(config_tree)
        logs.configure(self._config.log_format)
        self._pipeline = pipeline
        self._engine: RemoteEngine | None = None
        self._place = f"ingress-{uuid.uuid4().hex}"
        self._reporting: asyncio.Task[None] | None = None
        self._tracer: Tracer | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve after the constructor. Waits for the pipeline; raises Unavailable if it never starts."""
        node_id, host = node_address()
        self._engine = RemoteEngine(self._config, self._pipe(), host=host, node_id=node_id)
        await self._engine.connect()
        # The coordinator answered, so the target's folder is prepared at least on its node.
        folder = await asyncio.to_thread(prepare, self._config.target, log.info)
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        grammars = await asyncio.to_thread(Grammars, tokenizer)
        check = partial(grammars.check, max_bytes=self._config.server.max_schema_bytes)
        app = create_app(self._engine, tokenizer, self._config, check_structured=check)
        self._tracer = app.state.tracer
        self._reporting = asyncio.ensure_future(self._report(app.state.metrics))
        return app

    def _pipe(self) -> Pipe:
        async def connect(name: str, address: Address, cursor: int) -> Welcome:
            answer: Welcome = await self._pipeline.connect_ingress.remote(name, address, cursor)
            return answer

        async def health() -> Health:
            answer: Health = await self._pipeline.health.remote()
            return answer

        async def metrics(own: Snapshot) -> str:
            answer: str = await self._pipeline.metrics.remote(self._place, own)
            return answer

        async def status() -> dict[str, Any]:
            answer: dict[str, Any] = await self._pipeline.status.remote()
            return answer

        async def timeline() -> dict[str, Any]:
            answer: dict[str, Any] = await self._pipeline.timeline.remote()
            return answer

        async def hold(request_id: RequestId) -> None:
            call = self._pipeline.hold.remote(request_id)
            try:
                await call
            finally:
                call.cancel()

        return Pipe(connect, health, metrics, status, timeline, hold)

    async def _report(self, metrics: HttpMetrics) -> None:
        """Hand in what this replica counted, so that a scrape of any replica tells of all."""
        while True:
            with contextlib.suppress(Exception):  # a pipeline that is being replaced hears of it the next time
                await self._pipeline.report_metrics.remote(self._place, metrics.snapshot())
            await asyncio.sleep(_REPORT_S)

    async def __del__(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._engine is not None:
            self._engine.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
