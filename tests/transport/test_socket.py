"""The socket transport: what is sent arrives as it was, what does not belong is dropped, who dies is reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specserve.errors import ChannelError
from specserve.transport import Arrived, Mailbox, PeerLost
from specserve.transport import messages as m
from specserve.transport.peers import HEADER, MAGIC, VERSION
from specserve.transport.socket import Address, Endpoint, Heart, LoopMailbox, SocketChannel, SocketMailbox
from specserve.transport.streams import framed
from specserve.transport.thread_ends import end_of
from specserve.types import Delta, Failure, Request, RequestId, RequestStats, Sampling, Structured, TokenLogprob

WAIT_S = 20.0


class Side:
    """An endpoint with its mailbox."""

    def __init__(self, host: str | None = None, node_id: str = "", lost_after_s: float | None = None) -> None:
        self.mailbox = Mailbox()
        self.endpoint = Endpoint(self.mailbox, host=host, node_id=node_id, lost_after_s=lost_after_s)


@pytest.fixture
def make_side() -> Iterator[Callable[..., Side]]:
    """Endpoints that are closed at the end."""
    sides: list[Side] = []

    def make(**kwargs: object) -> Side:
        sides.append(Side(**kwargs))  # type: ignore[arg-type]
        return sides[-1]

    yield make
    for side in sides:
        side.endpoint.close()


class Raw:
    """A plain connection that says whatever a test wants."""

    def __init__(self, address: Address) -> None:
        self.stream = socket.socket(socket.AF_UNIX)
        self.stream.connect(address.ipc)

    def say(self, *frames: bytes) -> None:
        self.stream.sendall(b"".join(framed(frames)))


@pytest.fixture
def raw() -> Iterator[Callable[[Address], Raw]]:
    """Connections that are closed at the end."""
    made: list[Raw] = []

    def connect(address: Address) -> Raw:
        made.append(Raw(address))
        return made[-1]

    yield connect
    for each in made:
        each.stream.close()


def ints(*values: int, dtype: str = "int32") -> m.Array:
    return np.array(values, dtype=dtype)


def dists(rows: int, width: int) -> m.Dists:
    rng = np.random.default_rng(7)
    return m.Dists("dense", width, rng.integers(0, 256, (rows, 2 * width), dtype=np.uint8))


def every_message() -> list[m.Message]:
    stats = RequestStats(3, 4, 2, 6, 2, (0, 1, 1), 0.1, 0.2, 0.3)
    chain = Sampling(0.5, 0.9, 40, 0.1, 1.2, -1, 0.5, ((3, -100), (4, 0.5)), 2, ((1,), (2, 3)), (1, 2, 3))
    request = Request(RequestId("r"), (1, 2, 3), 9, chain, 2**63, ("a", "é"), (5,), True, 3, 1, "r", 20, 0)
    score = TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.5)))
    rows = ints(2**40, 7, dtype="int64")
    two = ints(1, 2)
    flags = np.array([True, False])
    hidden = m.Hidden("bfloat16", np.arange(72, dtype="uint8").reshape(3, 24))
    floats = np.array([-0.5, -np.inf, 0], dtype="float32")
    return [
        m.Open(2**40, 3, ints(1, 2, 3), 2, chain, (0, 2), "rejection", 2**63 - 1, 5, None),
        m.Open(1, 0, ints(1), 1, chain, (), "exact", 0, structured=Structured("choice", '["é"]')),
        m.Close(9),
        m.Plan(1, rows, two, two, two, ints(1, 2, 3), two, ints(4, 5, 6), two, ints(7, 8, 9)),
        m.Plan(1, rows, two, two, two, ints(1, 2, 3), two, ints(4, 5, 6), two, ints(7, 8, 9), two, hidden),
        m.Plan(1, rows, two, two, two, ints(1, 2, 3), two, ints(4, 5, 6), two, ints(7, 8, 9), levels=two, nodes=two),
        *(
            m.PlanAhead(
                1,
                rows,
                *[two] * 4,
                ints(1, 2, 3),
                *[two] * 4,
                rows,
                *[two] * 2,
                ints(1, 1),
                *[two] * 4,
                ints(4, 5, 6),
                *[two] * 3,
                *origins,
            )
            for origins in ((), (two, hidden))
        ),
        m.PushAhead(3, 0, True, two, ints(-1, 0), ints(7, 8), dists(1, 1000), 0.25),
        m.Verify(2, rows, two, two, two, ints(1, 2, 3), flags, two, two, two, dists(2, 1000), two, two),
        m.Verify(2, rows, two, two, two, ints(1, 2, 3), flags, two, two, two, m.Dists.none(), two, two, two),
        m.Verify(2, rows, two, two, two, ints(1, 2, 3), flags, two, two, two, m.Dists.none(), two, two, parents=two),
        m.Push(3, rows, two, two, two, two, two, two, two, flags, flags, m.Dists.none(), 0.25),
        m.Push(
            4,
            rows,
            two,
            two,
            two,
            two,
            two,
            two,
            two,
            flags,
            flags,
            m.Dists.none(),
            0.25,
            (1, 2, 3),
            np.float32([0.5, 1]),
        ),
        m.Verdict(4, rows, two, two, ints(-1, 4), 0.5, 0.125),
        m.Verdict(4, rows, two, two, two, 0.5, 0.125, m.Scores(two, two, floats, ints(1, 2, 3, 4, 5), floats)),
        m.Verdict(4, rows, two, two, two, 0.5, 0.125, hidden=hidden),
        m.Verdict(4, rows, two, two, two, 0.5, 0.125, last=ints(-1, 4)),
        m.Verify(2, rows, two, two, two, ints(1, 2, 3), flags, two, two, two, m.Dists.none(), two, two, depths=two),
        m.Verdict(4, rows, two, two, two, 0.5, 0.125, drafted=m.Drafted(two, ints(1, 2, 3), dists(3, 1000), 0.25)),
        m.Cannot(5, rows, two, two),
        m.Failed(6, m.empty("int64"), "why"),
        m.Submit(request),
        m.Submit(replace(request, structured=Structured("json_object"))),
        m.Submit(replace(request, answer=(4, 5)), stats),
        m.Places(("r", "q"), ("s",)),
        m.Reconnect(),
        m.Cancel("r"),
        m.Deltas(
            8,
            (
                Delta(RequestId("r"), (1, 2), 1, 2, "stop", "end", stats, None, (score,), (TokenLogprob(1, None),)),
                Delta(RequestId("q"), (), finish="error", failure=Failure(503, "unavailable", "gone")),
            ),
        ),
    ]


def as_bytes(message: m.Message) -> list[bytes]:
    return [bytes(buffer) for buffer in m.pack(message)]


def received(side: Side) -> object:
    item = side.mailbox.get(WAIT_S)
    assert item is not None, f"nothing arrived; dropped: {side.endpoint.dropped}"
    return item


def header(address: Address, sequence: int, *, life: int = 0, sender: int = 1) -> bytes:
    return HEADER.pack(MAGIC, VERSION, address.nonce, life, sender, sequence)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


@pytest.mark.parametrize("nodes", [("a", "a"), ("a", "b")], ids=["ipc", "tcp"])
def test_every_kind_arrives_as_it_was_sent(make_side, nodes):
    """Each message kind but Beat arrives once, in order, equal to the last byte, over ipc and over tcp."""
    here, there = make_side(node_id=nodes[0]), make_side(node_id=nodes[1], host="127.0.0.1")
    channel = here.endpoint.connect(there.endpoint.accept("here", 5))
    sent = every_message()
    assert {type(message).__name__ for message in sent} == m.Message.KINDS.keys() - {"Beat"}
    for message in sent:
        channel.send(message)
    for message in sent:
        item = received(there)
        assert isinstance(item, Arrived)
        assert (item.peer, item.life, type(item.message)) == ("here", 5, type(message))
        assert as_bytes(item.message) == as_bytes(message)
    assert not there.endpoint.dropped


def test_20_megabytes_arrive(make_side):
    """A large dense buffer arrives complete."""
    side = make_side()
    channel = side.endpoint.connect(side.endpoint.accept("big", 0))
    big = dists(20, 500_000)
    two = ints(1, 2)
    rows = ints(1, 2, dtype="int64")
    channel.send(m.Verify(2, rows, two, two, two, two, np.array([True, True]), two, two, two, big, two, two))
    item = received(side)
    assert np.array_equal(item.message.dists.rows, big.rows)


def test_other_node_needs_tcp(make_side):
    """Connecting across nodes to an endpoint without tcp is an error that says so."""
    here, there = make_side(node_id="a"), make_side(node_id="b")
    with pytest.raises(ChannelError, match="its own node only"):
        here.endpoint.connect(there.endpoint.accept("here", 0))


def test_garbage_is_counted_and_harmless(make_side, raw):
    """Wrong magic, nonce, length, life, cut or foreign bodies change nothing; a good message still comes through."""
    side = make_side()
    address = side.endpoint.accept("peer", 3)
    peer = raw(address)
    good = as_bytes(m.Close(1))
    unknown = HEADER.pack(MAGIC, VERSION, b"x" * 16, 3, 1, 0)
    bad_version = HEADER.pack(MAGIC, VERSION + 1, address.nonce, 3, 1, 0)
    verify = as_bytes(every_message()[3])
    peer.say(b"")
    peer.say(os.urandom(HEADER.size))
    peer.say(bad_version, *good)
    peer.say(unknown, *good)
    peer.say(header(address, 0, life=2), *good)
    peer.say(header(address, 0, life=3))
    peer.say(header(address, 1, life=3), os.urandom(50))
    peer.say(header(address, 2, life=3), *verify[:-1])
    peer.say(header(address, 3, life=3), verify[0], verify[1][:-1], *verify[2:])
    peer.say(header(address, 4, life=3), *good, b"more")
    peer.say(header(address, 5, life=3), *good)
    item = received(side)
    assert isinstance(item, Arrived)
    assert item.message == m.Close(1)
    assert side.endpoint.dropped == {"header": 3, "nonce": 1, "old life": 1, "damaged": 5}
    assert side.mailbox.get(0) is None


def test_random_bytes_never_stop_the_receiver(make_side, raw):
    """500 messages of random frames behind a valid header are all dropped as damaged."""
    side = make_side()
    address = side.endpoint.accept("peer", 0)
    peer = raw(address)
    rng = np.random.default_rng(3)
    for sequence in range(500):
        frames = [rng.bytes(int(size)) for size in rng.integers(0, 200, int(rng.integers(1, 5)))]
        peer.say(header(address, sequence), *frames)
    peer.say(header(address, 500), *as_bytes(m.Cancel("x")))
    assert received(side).message == m.Cancel("x")
    assert side.endpoint.dropped == {"damaged": 500}


def test_gap_ends_the_life_once(make_side, raw):
    """A missing message is reported as one PeerLost, and nothing of that life gets through afterwards."""
    side = make_side()
    address = side.endpoint.accept("peer", 4)
    peer = raw(address)
    good = as_bytes(m.Close(1))
    for sequence in (0, 2, 1, 3):
        peer.say(header(address, sequence, life=4), *good)
    assert isinstance(received(side), Arrived)
    lost = received(side)
    assert isinstance(lost, PeerLost)
    assert (lost.peer, lost.life) == ("peer", 4)
    until(lambda: side.endpoint.dropped.total() == 3)
    assert side.endpoint.dropped == {"gap": 1, "old life": 2}
    assert side.mailbox.get(0) is None


def test_repeated_message_is_dropped(make_side, raw):
    """The same sequence number twice is taken once."""
    side = make_side()
    address = side.endpoint.accept("peer", 0)
    peer = raw(address)
    for sequence, row in ((0, 1), (0, 1), (1, 2)):
        peer.say(header(address, sequence), *as_bytes(m.Close(row)))
    assert [received(side).message.row for _ in range(2)] == [1, 2]
    assert side.endpoint.dropped == {"repeated": 1}


def test_new_life_silences_the_old_one(make_side):
    """After a peer was accepted again, its old channel is not heard and the new one is."""
    side = make_side()
    old = side.endpoint.connect(side.endpoint.accept("peer", 0))
    new = side.endpoint.connect(side.endpoint.accept("peer", 1))
    old.send(m.Close(1))
    new.send(m.Close(2))
    item = received(side)
    assert (item.life, item.message.row) == (1, 2)
    until(lambda: side.endpoint.dropped == {"old life": 1})


def test_concurrent_senders_keep_their_own_order(make_side):
    """Eight channels of one peer, each with its own thread: all messages arrive, in order per channel."""
    side = make_side()
    address = side.endpoint.accept("peer", 0)
    channels = [side.endpoint.connect(address) for _ in range(8)]

    def send(channel: SocketChannel, number: int) -> None:
        for index in range(200):
            channel.send(m.Close(number * 1000 + index))

    threads = [threading.Thread(target=send, args=pair) for pair in zip(channels, range(8), strict=True)]
    for thread in threads:
        thread.start()
    rows = [received(side).message.row for _ in range(1600)]
    for thread in threads:
        thread.join()
    for number in range(8):
        assert [row for row in rows if row // 1000 == number] == [number * 1000 + index for index in range(200)]


def test_beats_are_consumed(make_side):
    """A beat updates what is known of the peer and is not delivered as a message."""
    side = make_side()
    assert side.endpoint.progress("peer") is None
    channel = side.endpoint.connect(side.endpoint.accept("peer", 0))
    heart = Heart(channel, 0.01, lambda: (41, True))
    until(lambda: side.endpoint.progress("peer") == (41, True))
    heart.close()
    heart.close()
    assert side.mailbox.get(0) is None


def test_silence_is_reported_once_and_only_after_a_first_word(make_side):
    """A peer that never spoke is not lost; one that beat and stopped is, once."""
    side = make_side(lost_after_s=0.2)
    side.endpoint.accept("mute", 0)
    channel = side.endpoint.connect(side.endpoint.accept("peer", 6))
    heart = Heart(channel, 0.02, lambda: (0, False))
    assert side.mailbox.get(0.6) is None
    heart.close()
    lost = received(side)
    assert isinstance(lost, PeerLost)
    assert (lost.peer, lost.life) == ("peer", 6)
    assert side.mailbox.get(0.5) is None


def test_chatter_of_one_peer_does_not_hide_the_silence_of_another(make_side):
    """While one peer sends without pause, another one's death is still noticed."""
    side = make_side(lost_after_s=0.2)
    busy = Heart(side.endpoint.connect(side.endpoint.accept("busy", 0)), 0.001, lambda: (0, True))
    side.endpoint.connect(side.endpoint.accept("quiet", 0)).send(m.Close(1))
    assert received(side).message == m.Close(1)
    assert received(side).peer == "quiet"
    busy.close()


def test_expected_peer_may_be_lost_without_a_word(make_side):
    """A peer that is expected and never speaks is reported."""
    side = make_side(lost_after_s=0.2)
    side.endpoint.accept("peer", 3)
    side.endpoint.expect("peer")
    side.endpoint.expect("stranger")
    lost = received(side)
    assert isinstance(lost, PeerLost)
    assert (lost.peer, lost.life) == ("peer", 3)


def test_forgotten_peer_is_not_reported(make_side):
    """A peer that left on purpose causes no PeerLost."""
    side = make_side(lost_after_s=0.1)
    channel = side.endpoint.connect(side.endpoint.accept("peer", 0))
    channel.send(m.Close(1))
    assert isinstance(received(side), Arrived)
    side.endpoint.forget("peer")
    side.endpoint.forget("stranger")
    assert side.mailbox.get(0.4) is None


_CHILD = """
import pickle, sys, time
from specserve.transport import Mailbox
from specserve.transport.socket import Endpoint, Heart
address = pickle.loads(bytes.fromhex(sys.argv[1]))
endpoint = Endpoint(Mailbox())
Heart(endpoint.connect(address), 0.05, lambda: (1, False))
time.sleep(120)
"""


def test_killed_process_is_noticed(make_side, tmp_path):
    """SIGKILL of a beating process leads to PeerLost; the address survives pickling on the way."""
    import pickle

    side = make_side(lost_after_s=0.5)
    address = side.endpoint.accept("child", 2)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", _CHILD, pickle.dumps(address).hex()], env=environment)
    try:
        until(lambda: side.endpoint.progress("child") == (1, False))
        child.send_signal(signal.SIGKILL)
        lost = received(side)
        assert isinstance(lost, PeerLost)
        assert (lost.peer, lost.life) == ("child", 2)
    finally:
        child.kill()
        child.wait()


_LISTENING_CHILD = """
import pickle, time
from specserve.transport import Mailbox
from specserve.transport.socket import Endpoint
mailbox = Mailbox()
endpoint = Endpoint(mailbox)
print(pickle.dumps(endpoint.accept("me", 3)).hex(), flush=True)
mailbox.get(60)
print("heard", flush=True)
time.sleep(120)
"""


def test_killed_process_on_this_node_is_noticed_by_its_connection(make_side, tmp_path):
    """The channel to a watched peer breaks with its process, long before its silence would tell; no later life is hit.

    A channel that is closed here reports nobody, and leaves no thread behind.
    """
    import pickle

    side = make_side(lost_after_s=600.0)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", _LISTENING_CHILD], env=environment, stdout=subprocess.PIPE)
    try:
        address = pickle.loads(bytes.fromhex(child.stdout.readline().decode()))
        for peer, life in (("child", 3), ("other", 3), ("closed", 3)):
            side.endpoint.accept(peer, life)
            channel = side.endpoint.connect(address, peer)
            side.endpoint.watch(channel, peer, life)
            channel.send(m.Close(1))
        channel.close()
        side.endpoint.accept("other", 4)
        assert child.stdout.readline() == b"heard\n"
        child.send_signal(signal.SIGKILL)
        lost = received(side)
        assert isinstance(lost, PeerLost)
        assert (lost.peer, lost.life, lost.gone) == ("child", 3, False)
        assert side.mailbox.get(0.3) is None
    finally:
        child.kill()
        child.wait()
    side.endpoint.close()
    until(lambda: all(thread.name != "specserve-disconnect" for thread in threading.enumerate()))


_FORKING_CHILD = """
import os, pickle, signal, time
from specserve.transport import Mailbox
from specserve.transport.socket import Endpoint
mailbox = Mailbox()
endpoint = Endpoint(mailbox)
print(pickle.dumps(endpoint.accept("me", 3)).hex(), flush=True)
mailbox.get(60)
heir = os.fork()
if heir:
    print(heir, flush=True)
time.sleep(120)
"""


def test_a_killed_process_is_noticed_before_its_connection_breaks(make_side, tmp_path):
    """The system closes what a process held after all else; here another process holds it, so that it stays open."""
    import pickle

    if not _tells_ends_of_threads():
        pytest.skip("the system does not tell ends of threads (Linux 6.9)")
    side = make_side(lost_after_s=600.0)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", _FORKING_CHILD], env=environment, stdout=subprocess.PIPE)
    heir = None
    try:
        address = pickle.loads(bytes.fromhex(child.stdout.readline().decode()))
        side.endpoint.accept("child", 3)
        channel = side.endpoint.connect(address, "child")
        side.endpoint.watch(channel, "child", 3)
        channel.send(m.Close(1))
        heir = int(child.stdout.readline())
        assert side.mailbox.get(0.1) is None
        child.send_signal(signal.SIGKILL)
        lost = received(side)
        assert isinstance(lost, PeerLost)
        assert (lost.peer, lost.life, lost.gone) == ("child", 3, False)
        assert not _ended(channel.ends())
    finally:
        child.kill()
        child.wait()
        if heir is not None:
            os.kill(heir, signal.SIGKILL)


def _tells_ends_of_threads() -> bool:
    with socket.socketpair()[0] as stream:
        end = end_of(threading.get_native_id(), stream)
    if end is not None:
        end.close()
    return end is not None


def test_a_thread_of_another_process_says_nothing_of_a_stream(make_side):
    """Numbers of threads mean something in their own container only: one that is not the peer's is not believed."""
    here, there = make_side(), make_side()
    address = there.endpoint.accept("here", 3)
    with here.endpoint.connect(address, "there").ends() as stream:
        assert end_of(os.getppid(), stream) is None


def test_a_process_that_may_connect_again_is_lost_when_it_is_dead(make_side, tmp_path):
    """A connection that breaks while it lives is made again, however often; its death is noticed at once."""
    import pickle

    side = make_side(lost_after_s=600.0)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", _LISTENING_CHILD], env=environment, stdout=subprocess.PIPE)
    try:
        address = pickle.loads(bytes.fromhex(child.stdout.readline().decode()))
        side.endpoint.accept("child", 3)
        channel = side.endpoint.connect(address, "child")
        side.endpoint.watch_process(channel, "child", 3)
        for _ in range(3):
            before = channel.ends()
            before.shutdown(socket.SHUT_RDWR)
            until(lambda: (now := channel.ends()) is not None and now.fileno() != -1 and not _ended(now))
            before.close()
        assert side.mailbox.get(0.1) is None
        channel.send(m.Close(1))
        assert child.stdout.readline() == b"heard\n"
        child.send_signal(signal.SIGKILL)
        lost = received(side)
        assert isinstance(lost, PeerLost)
        assert (lost.peer, lost.life, lost.gone) == ("child", 3, True)
    finally:
        child.kill()
        child.wait()


def _ended(stream: socket.socket) -> bool:
    """Whether the stream is over; the handle is used up."""
    with stream:
        try:
            return stream.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False


def test_a_process_that_cannot_be_found_is_judged_by_its_silence(make_side):
    """Whoever renamed its socket's file, it may live: its broken connection says nothing."""
    here, there = make_side(lost_after_s=0.5), make_side()
    here.endpoint.accept("there", 3)
    address = there.endpoint.accept("here", 3)
    channel = here.endpoint.connect(address, "there")
    here.endpoint.watch_process(channel, "there", 3)
    here.endpoint.expect("there")
    os.rename(address.ipc, address.ipc + ".hidden")
    with channel.ends() as stream:
        stream.shutdown(socket.SHUT_RDWR)
    lost = received(here)
    assert isinstance(lost, PeerLost)
    assert "no sign of life" in lost.reason


def test_send_never_blocks(make_side):
    """Towards an address where nobody listens, sends queue up to a bound and then raise ChannelError."""
    side = make_side()
    channel = side.endpoint.connect(Address("", "/nowhere/at/all", None, b"0" * 16, 0))
    with pytest.raises(ChannelError, match="unread"):
        list(map(channel.send, map(m.Close, range(20_000))))


def test_an_unread_peer_gets_everything_in_order(make_side):
    """More than the system takes is kept, by a sender that does not wait, and arrives as the peer reads."""
    mailbox = SocketMailbox()
    there = Endpoint(mailbox)
    try:
        channel = make_side().endpoint.connect(there.accept("peer", 0))
        dense = [dists(20, 50_000) for _ in range(8)]
        for number, each in enumerate(dense):
            channel.send(m.PushAhead(number, 0, True, m.empty(), m.empty(), m.empty(), each, 0.0))
            channel.send(m.Close(number))
        for number, each in enumerate(dense):
            push, close = (mailbox.get(WAIT_S).message for _ in range(2))
            assert (push.plan, close.row) == (number, number)
            assert np.array_equal(push.dists.rows, each.rows)
    finally:
        there.close()


def test_a_peer_that_never_reads_is_given_up(make_side):
    """What waits for it is bounded."""
    there = Endpoint(SocketMailbox())
    try:
        channel = make_side().endpoint.connect(there.accept("peer", 0))
        with pytest.raises(ChannelError, match="unread"):
            list(map(channel.send, [m.Cancel("x" * 4000)] * 100_000))
    finally:
        there.close()


def test_what_is_no_stream_of_messages_harms_its_own_connection_only(make_side, raw):
    """Too many frames, too many bytes, and lengths that are not the size's: hung up on, and the others are heard."""
    side = make_side()
    address = side.endpoint.accept("peer", 0)
    honest = raw(address)
    lies = [b"GET / HTTP/1.1\r\n", (1).to_bytes(4) + (2**31).to_bytes(4), bytes(8)]
    lies += [
        (1).to_bytes(4) + (16).to_bytes(4) + (64).to_bytes(4) + bytes(12),
        (9).to_bytes(4) + (8).to_bytes(4) + bytes(8),
    ]
    for number, lie in enumerate(lies):
        liar = raw(address)
        liar.stream.sendall(lie)
        assert liar.stream.recv(1) == b""
        honest.say(header(address, number), *as_bytes(m.Close(number)))
        assert received(side).message.row == number
    assert side.endpoint.dropped == {"framing": len(lies)}


def test_a_message_in_many_pieces_arrives(make_side, raw):
    """Byte by byte, and with the end of one message and the beginning of the next in one piece."""
    side = make_side()
    address = side.endpoint.accept("peer", 0)
    stream = raw(address).stream
    said = b"".join(
        piece for number in range(3) for piece in framed([header(address, number), *as_bytes(m.Close(number))])
    )
    for byte in said[:60]:
        stream.sendall(bytes([byte]))
    stream.sendall(said[60:150])
    stream.sendall(said[150:])
    assert [received(side).message.row for _ in range(3)] == [0, 1, 2]


def test_what_no_peer_takes_is_refused_where_it_is_sent(make_side, monkeypatch):
    """Too many frames or bytes cost the sender an error in words, and neither the stream nor a number."""
    side = make_side()
    channel = side.endpoint.connect(side.endpoint.accept("peer", 0))
    with pytest.raises(ChannelError, match="0 frames"):
        framed([])
    with pytest.raises(ChannelError, match="65 frames"):
        framed([b""] * 65)
    monkeypatch.setattr("specserve.transport.streams._LARGEST_MESSAGE", 4096)
    with pytest.raises(ChannelError, match="at most 4096 bytes"):
        channel.send(m.Cancel("x" * 4096))
    channel.send(m.Close(1))
    assert received(side).message.row == 1
    assert not side.endpoint.dropped


def test_half_a_message_is_no_message(make_side, raw):
    """A connection that ends within a message leaves nothing of it, and nobody is lost for that."""
    side = make_side()
    address = side.endpoint.accept("peer", 0)
    first, second = raw(address), raw(address)
    first.stream.sendall(b"".join(framed([header(address, 0), *as_bytes(m.Close(1))]))[:-8])
    first.stream.close()
    second.say(header(address, 0), *as_bytes(m.Close(2)))
    assert received(side).message.row == 2
    assert not side.endpoint.dropped


@pytest.mark.parametrize("lost", [False, True])
def test_a_broken_connection_is_made_again(make_side, lost):
    """Where nothing was on its way it goes on as before; what was lost shows in the number of the next message."""
    side = make_side()
    channel = side.endpoint.connect(side.endpoint.accept("peer", 5))
    channel.send(m.Close(0))
    assert received(side).message.row == 0
    channel._stream._stream.shutdown(socket.SHUT_RDWR)
    if lost:
        channel._sequence += 1
    channel.send(m.Close(1))
    found = received(side)
    assert isinstance(found, PeerLost) if lost else found.message.row == 1


def test_the_owner_of_a_socket_mailbox_reads_by_waiting_there():
    """Messages and items of other threads wake the same wait; silence is judged there; no thread is made."""
    before = set(threading.enumerate())
    mailbox = SocketMailbox()
    endpoint = Endpoint(mailbox, lost_after_s=0.2)
    try:
        assert set(threading.enumerate()) == before
        channel = endpoint.connect(endpoint.accept("peer", 1))
        assert mailbox.get(0) is None
        assert mailbox.get(0.01) is None
        threading.Timer(0.05, channel.send, [m.Close(1)]).start()
        assert mailbox.get(WAIT_S).message.row == 1
        threading.Timer(0.05, mailbox.put, ["word"]).start()
        assert mailbox.get() == "word"
        lost = mailbox.get()
        assert isinstance(lost, PeerLost)
        assert lost.gone
    finally:
        endpoint.close()
    mailbox.put("last")
    assert mailbox.get() == "last"
    assert mailbox.get(0.01) is None


def test_the_owner_of_a_loop_mailbox_reads_on_its_loop():
    """Messages, and items of other threads, are taken on the loop; silence is judged there; no thread is made."""

    async def run() -> None:
        taken: asyncio.Queue[object] = asyncio.Queue()
        threads: set[threading.Thread] = set()

        def take(item: object) -> None:
            threads.add(threading.current_thread())
            if item == "nonsense":
                raise ValueError(item)
            taken.put_nowait(item)

        mailbox = LoopMailbox(asyncio.get_running_loop(), take)
        endpoint = Endpoint(mailbox, lost_after_s=0.5)
        channel = endpoint.connect(endpoint.accept("peer", 1))
        for row in range(3):
            channel.send(m.Close(row))
        assert [(await taken.get()).message.row for _ in range(3)] == [0, 1, 2]
        for word in ("nonsense", "word"):  # what one item raises keeps no other one waiting
            await asyncio.to_thread(mailbox.put, word)
        assert await taken.get() == "word"
        assert (await taken.get()).gone
        assert threads == {threading.current_thread()}
        channel.send(m.Close(3))
        for each in (endpoint, mailbox, endpoint):  # in any order
            each.close()
        await asyncio.sleep(0)
        assert taken.empty()

    before = set(threading.enumerate())
    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert set(threading.enumerate()) == before


def test_close_leaves_nothing(monkeypatch, tmp_path):
    """After close, twice, no thread and no file is left; sending and connecting raise ChannelError."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(threading.enumerate())
    endpoint = Endpoint(Mailbox(), host="127.0.0.1")
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    address = endpoint.accept("peer", 0)
    channel = endpoint.connect(address)
    channel.send(m.Close(1))
    endpoint.close()
    endpoint.close()
    channel.close()
    with pytest.raises(ChannelError):
        channel.send(m.Close(1))
    with pytest.raises(ChannelError):
        endpoint.connect(address)
    assert set(threading.enumerate()) == before
    assert list(tmp_path.iterdir()) == []


def test_too_long_path_is_refused_cleanly(monkeypatch, tmp_path):
    """A temporary folder that is too deep for a socket is an error with advice, and leaves no file."""
    deep = Path(tmp_path) / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ChannelError, match="TMPDIR"):
        Endpoint(Mailbox())
    assert list(deep.iterdir()) == []


def test_without_free_files_it_listens_less_and_again_later(make_side, monkeypatch, caplog):
    """Who waits to be accepted is not looked at without end, and is heard once there are files again."""
    side = make_side()
    address = side.endpoint.accept("peer", 0)
    client = socket.socket(socket.AF_UNIX)
    looks = []
    look_at = side.endpoint._look_at
    monkeypatch.setattr(side.endpoint, "_look_at", lambda ready: (looks.append(ready), look_at(ready)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
    try:
        held = fill_up()
        client.connect(address.ipc)
        time.sleep(1.0)
        tries = len(looks)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in held:
            os.close(number)
    assert 1 <= tries < 50
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    client.sendall(b"".join(framed([header(address, 0), *as_bytes(m.Close(1))])))
    arrived = side.mailbox.get(WAIT_S)
    assert isinstance(arrived, Arrived)
    assert arrived.message == m.Close(1)
    client.close()


def test_a_sender_without_files_loses_its_message_and_nothing_else(make_side):
    """As where nobody listens: no error of the system's reaches whoever sends, and the number shows what is missing."""
    side = make_side()
    address = side.endpoint.accept("peer", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    held = fill_up()
    try:
        channel = side.endpoint.connect(address)
        assert channel.ends() is None
        channel.send(m.Close(1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in held:
            os.close(number)
    channel.send(m.Close(2))
    assert isinstance(received(side), PeerLost)


def fill_up() -> list[int]:
    """Open files until there are none left."""
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.dup(0))
    return held
