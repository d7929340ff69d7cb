"""The channel without a wire: the worker runs in the sender's own thread. And the loop of a worker that has its own."""

from __future__ import annotations

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
