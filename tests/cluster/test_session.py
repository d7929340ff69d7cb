"""A worker's session over real sockets: what it cannot hear ends its life, so that somebody notices."""

from __future__ import annotations

import pytest

from specserve.cluster.session import WorkerSession
from specserve.transport import Arrived, Mailbox, PeerLost
from specserve.transport.messages import Cancel, Close
from specserve.transport.socket import Endpoint


class Echo:
    """Answers a Close with a Cancel; a negative row makes it raise."""

    def handle(self, message):
        if message.row < 0:
            raise RuntimeError("broken")
        return [Cancel(str(message.row))]


@pytest.fixture
def joined():
    """A coordinator's mailbox, and the channel to a worker whose heart it listens to."""
    mailbox = Mailbox()
    here = Endpoint(mailbox, lost_after_s=0.4)
    address = here.accept("target", 3)
    session = WorkerSession(Echo(), address, 3, host=None, node_id="", heartbeat_s=0.05)
    here.expect("target")
    try:
        yield mailbox, here.connect(session.address)
    finally:
        session.close()
        here.close()


def test_a_message_that_was_lost_on_the_way_ends_the_life(joined):
    """The worker sees the gap, falls silent, and is found lost: nobody waits for an answer to what never came."""
    mailbox, channel = joined
    channel.send(Close(1))
    assert mailbox.get(5).message == Cancel("1")
    channel._sequence += 1  # what a broken connection does
    channel.send(Close(2))
    found = mailbox.get(5)
    assert isinstance(found, PeerLost)
    assert (found.peer, found.life) == ("target", 3)


def test_a_worker_that_fails_outside_of_a_batch_falls_silent(joined):
    """It answers nothing more, and is found lost."""
    mailbox, channel = joined
    channel.send(Close(-1))
    channel.send(Close(2))
    found = mailbox.get(5)
    assert isinstance(found, PeerLost)


def test_a_sound_session_is_heard(joined):
    """Longer than the silence that counts as a loss, without any message."""
    mailbox, channel = joined
    assert mailbox.get(1.0) is None
    channel.send(Close(7))
    found = mailbox.get(5)
    assert isinstance(found, Arrived)
    assert found.message == Cancel("7")
