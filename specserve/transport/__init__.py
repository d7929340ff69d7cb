"""How coordinator, workers and ingresses talk: one seam, several ways to carry it.

A `Channel` sends typed messages (`messages`) to one peer and never blocks; what a peer sends arrives in the
receiver's `Mailbox`. `local` runs a worker in the caller's own process, `socket` carries frames between processes.
A third way, plain Ray calls, lives in `cluster`, the only room that may import ray.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from specserve.transport.messages import Message


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message with the name of the peer that sent it and the peer's life."""

    peer: str
    life: int
    message: Message


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A channel found its peer gone, or cut off: this life of it says no more. Delivered like a message, in order.

    gone: its process is dead, or said nothing for too long; else it may live, but something that it sent was lost.
    """

    peer: str
    life: int
    reason: str
    gone: bool = False


class Mailbox:
    """Where everything that concerns one owner arrives, in order, from any thread.

    Not a bounded queue: what may be sent is bounded by the protocol (one batch in flight per worker) and, towards
    clients, by admission.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[object] = SimpleQueue()

    def put(self, item: object) -> None:
        """Add an item; wakes a waiting `get`."""
        self._queue.put(item)

    @property
    def empty(self) -> bool:
        """Whether nothing is there."""
        return self._queue.empty()

    def get(self, timeout_s: float | None = None) -> object | None:
        """The next item, or None when `timeout_s` seconds passed without one. 0 looks without waiting."""
        try:
            if timeout_s == 0:
                return self._queue.get_nowait()
            return self._queue.get(timeout=timeout_s)
        except Empty:
            return None


class Channel(Protocol):
    """One direction of a conversation with one peer."""

    def send(self, message: Message) -> None:
        """Hand a message over. Raises ChannelError when the peer is known to be gone; never blocks."""
        ...

    def close(self) -> None:
        """Release what the channel holds. Idempotent."""
        ...


class Worker(Protocol):
    """A draft worker or a verifier, as the transport sees it: messages in, messages out, one at a time."""

    def handle(self, message: Message) -> Iterable[Message]:
        """Do what the message asks, while the replies are taken. Errors of one batch are replies, `Failed`, too."""
        ...
