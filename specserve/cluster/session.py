"""What a worker process runs while it is connected to a coordinator. Plain threads, no Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable

from specserve.errors import ChannelError
from specserve.transport import Arrived, Mailbox, PeerLost, Worker
from specserve.transport.socket import Address, Endpoint, Heart

log = logging.getLogger(__name__)


class WorkerSession:
    """One life of a worker: a thread that receives and computes, and a heart, both towards one coordinator.

    `address` is where the coordinator may send to. A session whose worker fails outside of a batch, or which messages
    of the coordinator did not reach, stops its heart, so that the coordinator finds it lost and a new one is made.
    """

    def __init__(
        self, worker: Worker, coordinator: Address, life: int, *, host: str | None, node_id: str, heartbeat_s: float
    ) -> None:
        self._worker = worker
        self._finished = 0
        self._busy = False
        self._failed = False
        self._endpoint = Endpoint(_Direct(self._handle), host=host, node_id=node_id)
        self.address = self._endpoint.accept("coordinator", life)
        self._channel = self._endpoint.connect(coordinator)
        self._heart = Heart(self._endpoint.connect(coordinator), heartbeat_s, lambda: (self._finished, self._busy))

    def _handle(self, item: object) -> None:
        """Runs on the receive thread: while a batch is computed, what comes next waits in the socket."""
        if isinstance(item, PeerLost):
            self._fail(f"it cannot hear the coordinator: {item.reason}")
        if not isinstance(item, Arrived) or self._failed:
            return
        self._busy = True
        try:
            for reply in self._worker.handle(item.message):
                self._channel.send(reply)
        except ChannelError as error:
            log.warning("the coordinator takes no replies: %s", error.message)
        except Exception:
            log.exception("the worker failed outside of a batch")
            self._fail("it failed outside of a batch")
        finally:
            self._finished += 1
            self._busy = False

    def _fail(self, reason: str) -> None:
        """Do nothing more and say nothing more, so that the coordinator misses this life and begins another."""
        log.warning("this life of the worker ends, and it waits for a new connection: %s", reason)
        self._failed = True
        self._heart.stop()

    def close(self) -> None:
        """End after the batch that is being computed, if any. Idempotent."""
        self._heart.close()
        self._endpoint.close()


class _Direct(Mailbox):
    """Hands every item to a function in the thread that delivers it: one thread hop less in every round."""

    def __init__(self, handle: Callable[[object], None]) -> None:
        super().__init__()
        self._take = handle

    def put(self, item: object) -> None:
        self._take(item)
