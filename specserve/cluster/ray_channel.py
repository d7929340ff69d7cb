"""The same channel by plain actor calls: slower by several milliseconds a round, a fallback and a baseline.

Frames travel as bytes; only Ray's own envelope is pickled.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import ray

from specserve.errors import ChannelError
from specserve.transport import Arrived, Mailbox, PeerLost
from specserve.transport.messages import Message, pack, unpack
from specserve.transport.traffic import Traffic

Frames = list[bytes]


def to_bytes(message: Message) -> Frames:
    """The frames of a message, ready for Ray."""
    return [bytes(frame) for frame in pack(message)]


class RayChannel:
    """Sends by `worker.deliver.remote(life, frames)`; a thread puts the replies into the mailbox, in order."""

    def __init__(self, worker: Any, mailbox: Mailbox, peer: str, life: int, traffic: Traffic) -> None:
        self._traffic = traffic
        self._worker = worker
        self._mailbox = mailbox
        self._peer = peer
        self._life = life
        self._closed = False
        self._underway: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._collect, name=f"specserve-replies-{peer}", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Call the worker without waiting. Raises ChannelError after `close` or a loss."""
        if self._closed:
            raise ChannelError(f"the channel to {self._peer} is closed")
        began = time.perf_counter()
        frames = to_bytes(message)
        self._traffic.sent(self._peer, message, frames, time.perf_counter() - began)
        self._underway.put(self._worker.deliver.remote(self._life, frames))

    def _collect(self) -> None:
        while (reference := self._underway.get()) is not None:
            try:
                replies = ray.get(reference)
                for frames in replies:
                    self._take(frames)
            except Exception as error:  # a dead actor, an old life, a damaged reply: this life of the peer is over
                self._closed = True
                self._mailbox.put(PeerLost(self._peer, self._life, f"{type(error).__name__}: {error}"[:500]))
                return

    def _take(self, frames: Frames) -> None:
        began = time.perf_counter()
        message = unpack(frames)
        self._traffic.received(self._peer, message, frames, time.perf_counter() - began)
        self._mailbox.put(Arrived(self._peer, self._life, message))

    def close(self) -> None:
        """Take no further replies. Idempotent; does not wait for a call that is underway."""
        self._closed = True
        self._underway.put(None)
