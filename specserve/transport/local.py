"""Channels without a wire: to a worker that runs in the sender's own thread, or in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from specserve.errors import ChannelError
from specserve.transport import Arrived, Channel, Mailbox, Worker
from specserve.transport.messages import Message


class LocalChannel:
    """Sends to a worker in this process: `send` returns when the work is done and the replies are in the mailbox."""

    def __init__(self, worker: Worker, mailbox: Mailbox, peer: str, life: int = 0) -> None:
        self._worker: Worker | None = worker
        self._mailbox = mailbox
        self._peer = peer
        self._life = life

    def send(self, message: Message) -> None:
        """Let the worker handle the message now. Raises ChannelError after `close`."""
        if self._worker is None:
            raise ChannelError(f"the channel to {self._peer} is closed")
        for reply in self._worker.handle(message):
            self._mailbox.put(Arrived(self._peer, self._life, reply))

    def close(self) -> None:
        """Let go of the worker. Idempotent."""
        self._worker = None


class ThreadChannel:
    """Sends to a worker in this process that has a thread of its own, so that two of them can work at once."""

    def __init__(self, worker: Worker, mailbox: Mailbox, peer: str, life: int = 0) -> None:
        self._inbox = Mailbox()
        self._closed = False
        self._peer = peer
        back = _Back(mailbox, peer, life)
        self._thread = threading.Thread(
            target=worker_loop, args=(worker, self._inbox, back), name=f"specserve-{peer}", daemon=True
        )
        self._thread.start()

    def send(self, message: Message) -> None:
        """Hand a message over. Raises ChannelError after `close`."""
        if self._closed:
            raise ChannelError(f"the channel to {self._peer} is closed")
        self._inbox.put(Arrived(self._peer, 0, message))

    def close(self) -> None:
        """End the thread after what it was sent, without waiting for that. Idempotent."""
        if not self._closed:
            self._closed = True
            self._inbox.put(Stop())

    def join(self, patience_s: float) -> None:
        """Wait for the thread of a closed channel: the interpreter must not end while it computes."""
        self._thread.join(patience_s)


class _Back:
    """The way back from a worker in this process."""

    def __init__(self, mailbox: Mailbox, peer: str, life: int) -> None:
        self._mailbox, self._peer, self._life = mailbox, peer, life

    def send(self, message: Message) -> None:
        self._mailbox.put(Arrived(self._peer, self._life, message))

    def close(self) -> None:
        """Nothing to release."""


class Stop:
    """Put into a worker's mailbox, it ends `worker_loop` after the messages before it."""


def worker_loop(
    worker: Worker, mailbox: Mailbox, channel: Channel, on_progress: Callable[[int, bool], None] = lambda *_: None
) -> None:
    """Handle messages in order and send the replies, until a `Stop` or until the channel takes nothing any more.

    on_progress gets the number of messages handled so far and whether one is being handled now.
    """
    finished = 0
    while not isinstance(item := mailbox.get(), Stop):
        if not isinstance(item, Arrived):
            continue
        on_progress(finished, True)
        try:
            for reply in worker.handle(item.message):
                channel.send(reply)
        except ChannelError:
            return
        finally:
            finished += 1
            on_progress(finished, False)
