"""The Serve deployment that speaks HTTP: the FastAPI app of `api` on a `RemoteEngine`."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from ray import serve

from specserve import config as configs
from specserve.api.app import create_app
from specserve.cluster.actors import node_address
from specserve.cluster.remote import Pipe, RemoteEngine
from specserve.models.loading import prepare
from specserve.sampling.grammar import Grammars
from specserve.text import Tokenizer
from specserve.transport.socket import Address
from specserve.types import Health, ModelCard

log = logging.getLogger(__name__)


@serve.ingress()
class Ingress:
    """HTTP in front of one pipeline. Replicas are independent of each other."""

    def __init__(self, config_tree: dict[str, Any], pipeline: Any) -> None:
        self._config = configs.parse(config_tree)
        self._pipeline = pipeline
        self._engine: RemoteEngine | None = None

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
        return create_app(self._engine, tokenizer, self._config, check_structured=check)

    def _pipe(self) -> Pipe:
        async def connect(ingress_id: str, address: Address) -> tuple[Address, ModelCard]:
            answer: tuple[Address, ModelCard] = await self._pipeline.connect_ingress.remote(ingress_id, address)
            return answer

        async def health() -> Health:
            answer: Health = await self._pipeline.health.remote()
            return answer

        async def metrics() -> str:
            answer: str = await self._pipeline.metrics.remote()
            return answer

        return Pipe(connect, health, metrics)

    async def __del__(self) -> None:
        if self._engine is not None:
            self._engine.close()
