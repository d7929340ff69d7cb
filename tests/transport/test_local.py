"""The local channel and the worker loop."""

from __future__ import annotations

import threading

import pytest

from specserve.errors import ChannelError
from specserve.transport import Arrived, Mailbox
from specserve.transport.local import LocalChannel, Stop, ThreadChannel, worker_loop
from specserve.transport.messages import Cancel, Close, Message


class Echo:
    """Answers a Close with two Cancels."""

    def handle(self, message: Message) -> list[Message]:
        return [Cancel(str(message.row)), Cancel("end")] if isinstance(message, Close) else []


class Collector:
    """A channel that keeps what it is given, up to `room` messages."""

    def __init__(self, room: int = 1000) -> None:
        self.messages: list[Message] = []
        self.room = room

    def send(self, message: Message) -> None:
        if len(self.messages) == self.room:
            raise ChannelError("full")
        self.messages.append(message)

    def close(self) -> None:
        pass


def test_replies_are_in_the_mailbox_when_send_returns():
    """send runs the worker in the caller's thread and delivers its replies in order, with peer and life."""
    mailbox = Mailbox()
    channel = LocalChannel(Echo(), mailbox, "target", life=2)
    channel.send(Close(7))
    assert mailbox.get(0) == Arrived("target", 2, Cancel("7"))
    assert mailbox.get(0) == Arrived("target", 2, Cancel("end"))
    assert mailbox.get(0) is None


def test_closed_channel_refuses():
    """After close, twice, sending raises ChannelError."""
    channel = LocalChannel(Echo(), Mailbox(), "target")
    channel.close()
    channel.close()
    with pytest.raises(ChannelError, match="target"):
        channel.send(Close(1))


def test_worker_loop_answers_in_order_and_stops():
    """Messages before Stop are handled, those after it are not; progress counts them."""
    mailbox, channel, seen = Mailbox(), Collector(), []
    for row in (1, 2):
        mailbox.put(Arrived("coordinator", 0, Close(row)))
    mailbox.put("noise")
    mailbox.put(Stop())
    mailbox.put(Arrived("coordinator", 0, Close(3)))
    thread = threading.Thread(target=worker_loop, args=(Echo(), mailbox, channel, lambda *now: seen.append(now)))
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert channel.messages == [Cancel("1"), Cancel("end"), Cancel("2"), Cancel("end")]
    assert seen == [(0, True), (1, False), (1, True), (2, False)]


def test_worker_loop_ends_when_the_channel_does():
    """A worker whose coordinator is gone stops working for it."""
    mailbox, channel = Mailbox(), Collector(room=1)
    mailbox.put(Arrived("coordinator", 0, Close(1)))
    worker_loop(Echo(), mailbox, channel)
    assert channel.messages == [Cancel("1")]


def test_a_closed_thread_can_be_waited_for():
    """Closing does not wait, because the coordinator closes channels to workers that hang; joining does."""
    going_on = threading.Event()

    class Slow(Echo):
        def handle(self, message: Message) -> list[Message]:
            going_on.wait()
            return super().handle(message)

    mailbox = Mailbox()
    channel = ThreadChannel(Slow(), mailbox, "target")
    channel.send(Close(1))
    channel.close()
    channel.join(0.01)
    assert mailbox.get(0) is None
    going_on.set()
    channel.join(10)
    assert isinstance(mailbox.get(0), Arrived)
