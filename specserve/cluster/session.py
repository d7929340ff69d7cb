"""What a worker process runs while it is connected to a coordinator. Plain threads, no Ray."""

from __future__ import annotations

import logging
import threading

from specserve.transport import Mailbox, Worker
from specserve.transport.local import Stop, worker_loop
from specserve.transport.socket import Address, Endpoint, Heart

log = logging.getLogger(__name__)


class WorkerSession:
    """One life of a worker: a receive thread, a model thread and a heart, all towards one coordinator.

    `address` is where the coordinator may send to. A session whose model thread fails stops its heart, so that the
    coordinator finds it lost and a new session is made.
    """

    def __init__(
        self, worker: Worker, coordinator: Address, life: int, *, host: str | None, node_id: str, heartbeat_s: float
    ) -> None:
        self._worker = worker
        self._now = (0, False)
        self._mailbox = Mailbox()
        self._endpoint = Endpoint(self._mailbox, host=host, node_id=node_id)
        self.address = self._endpoint.accept("coordinator", life)
        self._channel = self._endpoint.connect(coordinator)
        self._heart = Heart(self._endpoint.connect(coordinator), heartbeat_s, lambda: self._now)
        self._thread = threading.Thread(target=self._work, name="specserve-model", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            worker_loop(self._worker, self._mailbox, self._channel, self._progressed)
        except Exception:
            log.exception("the worker failed outside of a batch; it waits for a new connection")
            self._heart.close()

    def _progressed(self, finished: int, busy: bool) -> None:
        self._now = (finished, busy)

    def close(self) -> None:
        """End after the batch that is being computed, if any. Idempotent."""
        self._mailbox.put(Stop())
        self._thread.join()
        self._heart.close()
        self._endpoint.close()
