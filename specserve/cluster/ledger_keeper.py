"""The Serve deployment that holds the ledger: one text for all pipelines and HTTP processes, whoever is scraped."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from specserve import config as configs
from specserve import logs
from specserve.cluster.fleet import Fleet
from specserve.cluster.ray_metrics import Mirror
from specserve.cluster.replica_port import stay_at_the_node
from specserve.metrics import Ledger, Snapshot
from specserve.metrics.ledger import COORDINATOR

_COLLECT_S = 2.0
_ANSWER_S = 2.0


class LedgerKeeper:
    """Outlives the pipelines, so that no counter falls when one of them ends."""

    def __init__(self, config_tree: dict[str, Any], pipelines: Any) -> None:
        stay_at_the_node()
        config = configs.parse(config_tree)
        logs.configure(config.log_format)
        self._fleet = Fleet(pipelines)
        self._ledger = Ledger(aliases=config.observe.vllm_aliases)
        self._mirror = Mirror() if config.observe.ray_metrics else None
        self._collecting = asyncio.ensure_future(self._collect())

    async def report_metrics(self, place: str, snapshot: Snapshot) -> None:
        """An ingress hands in its samples; every so often, and with each scrape."""
        self._ledger.take(place, snapshot)

    async def metrics(self, place: str, snapshot: Snapshot) -> str:
        """Prometheus text of all processes; of a coordinator that is away, what it said last."""
        self._ledger.take(place, snapshot)
        await self._ask_all()
        return self._ledger.render()

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._ask(name) for name in self._fleet.names()))

    async def _ask(self, name: str) -> None:
        with contextlib.suppress(Exception):  # it is starting, or being replaced
            snapshot = await asyncio.wait_for(self._fleet.at(name).snapshot.remote(), _ANSWER_S)
            if snapshot is not None:
                self._ledger.take(f"{COORDINATOR} {name}", snapshot)

    async def _collect(self) -> None:
        """What a coordinator counted since the last look is lost when it dies: look often."""
        await self._fleet.any().name.remote()
        while True:
            await self._ask_all()
            if self._mirror is not None:
                self._mirror.show(self._ledger.values())
            await asyncio.sleep(_COLLECT_S)

    async def __del__(self) -> None:
        self._collecting.cancel()
