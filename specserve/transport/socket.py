"""Messages between processes over stream sockets: of one node, or TCP across nodes. Nothing is ever unpickled.

An `Endpoint` is where a process receives. A peer may send to it after `accept` gave out an `Address` with a nonce made
for that peer and life; the address travels by some other way (a Ray actor call). Frame 0 of every message is the
header of `peers`, the rest is what `messages.pack` made; `streams` tells how frames become bytes.

No thread stands between the system and those who compute: a message is written by whoever sends it, and read by the
thread that takes it. Each thread that a message passes through on its way costs it another waking up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specserve.errors import ChannelError, ProtocolError
from specserve.transport import Arrived, Mailbox
from specserve.transport.messages import Beat, Buffer, Message, pack, unpack
from specserve.transport.peers import HEADER, MAGIC, VERSION, Peers
from specserve.transport.streams import Incoming, Outgoing, framed, listening
from specserve.transport.thread_ends import ThreadEnd, end_of
from specserve.transport.traffic import Traffic

_LONGEST_PATH = 100  # bytes; the kernel's limit for the path of a socket is 107
_TICK_S = 0.2
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """Where and as whom to send: ipc is a path, for peers of the same node_id, tcp a host and a port, for all others.

    nonce is 16 bytes, for this life only. reader is the system's number of a thread that ends with what listens there.
    """

    node_id: str
    ipc: str
    tcp: tuple[str, int] | None
    nonce: bytes
    life: int
    reader: int | None = None


class SocketChannel:
    """The sending end of a conversation. Made by `Endpoint.connect`; safe to use and to close from any thread."""

    def __init__(self, stream: Outgoing, address: Address, peer: str, traffic: Traffic) -> None:
        self._stream = stream
        self._nonce = address.nonce
        self._life = address.life
        self._reader = address.reader
        self._peer = peer
        self._traffic = traffic
        self._sender = secrets.randbits(32)
        self._sequence = 0

    def send(self, message: Message) -> None:
        """Hand a message over. Never blocks.

        Raises ChannelError when the peer takes nothing more or not so large a message, and after `close`.

        Arrays of the message must not be written to afterwards: large ones are not copied.
        """
        began = time.perf_counter()
        frames = pack(message)
        packing_s = time.perf_counter() - began
        self._stream.write(lambda: self._numbered(frames))
        self._traffic.sent(self._peer, message, frames, packing_s)

    def _numbered(self, frames: Sequence[Buffer]) -> list[Buffer]:
        header = HEADER.pack(MAGIC, VERSION, self._nonce, self._life, self._sender, self._sequence)
        message = framed([header, *frames])
        self._sequence += 1  # only now: a message that is refused leaves no gap
        return message

    @property
    def local(self) -> bool:
        """Whether the peer is on this node."""
        return self._stream.local

    def ends(self) -> socket.socket | None:
        """See `Outgoing.ends`."""
        return self._stream.ends()

    def reader_ends(self, stream: socket.socket) -> ThreadEnd | None:
        """What becomes readable when the thread ends that reads at the other end of this handle on the stream."""
        return None if self._reader is None else end_of(self._reader, stream)

    def reopened(self) -> socket.socket | None:
        """See `Outgoing.reopened`."""
        return self._stream.reopened()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._stream.closed

    def close(self) -> None:
        """Drop what is not sent yet and release the socket. Idempotent."""
        self._stream.close()


@dataclass(frozen=True, slots=True)
class _Watched:
    """A handle on the stream of a channel, or on who reads it, and what is done when that ends without our doing."""

    end: socket.socket | ThreadEnd
    channel: SocketChannel
    ended: Callable[[], None]

    def fileno(self) -> int:
        return self.end.fileno()

    def close(self) -> None:
        self.end.close()


class SocketMailbox(Mailbox):
    """The mailbox of an owner who reads the sockets of its endpoint, while waiting here, on its own thread.

    While nobody waits nothing is read, and nobody's silence counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._endpoint: Endpoint | None = None
        self._asleep = False

    def read_from(self, endpoint: Endpoint) -> None:
        """Called by the endpoint that is given this mailbox."""
        self._endpoint = endpoint

    def close(self) -> None:
        """The endpoint closes: nothing more will be read."""

    def put(self, item: object) -> None:
        """See `Mailbox`."""
        super().put(item)
        if self._asleep and self._endpoint is not None:
            self._endpoint.wake()

    def get(self, timeout_s: float | None = None) -> object | None:
        """See `Mailbox`. 0 looks at what was read before only."""
        if timeout_s == 0 or self._endpoint is None:
            return super().get(timeout_s)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._asleep = True  # before the look at the queue: what is put from here on wakes us
            left_s = _TICK_S if end_s is None else max(0.0, end_s - time.monotonic())
            open_still = self._endpoint.receive(left_s if self.empty else 0.0, self._awake)
            if not self.empty:
                return super().get(0)
            if not open_still:
                return super().get(left_s if end_s is not None else None)
            if end_s is not None and time.monotonic() >= end_s:
                return None

    def _awake(self) -> None:
        self._asleep = False


class LoopMailbox(SocketMailbox):
    """The mailbox of an owner on an asyncio loop, which reads the sockets there and hands each item to `take`.

    Made and closed on the loop's thread. A thread that reads would be woken for each message, and then the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[object], None]) -> None:
        super().__init__()
        self._loop = loop
        self._take = take
        self._tick: asyncio.TimerHandle | None = None
        self._reads: int | None = None

    def read_from(self, endpoint: Endpoint) -> None:
        """See `SocketMailbox`."""
        super().read_from(endpoint)
        self._reads = endpoint.fileno()
        self._loop.add_reader(self._reads, self._read)
        self._tick = self._loop.call_later(_TICK_S, self._look)

    def _look(self) -> None:
        """Silence makes no socket readable."""
        self._tick = self._loop.call_later(_TICK_S, self._look)
        self._read()

    def _read(self) -> None:
        assert self._endpoint is not None
        self._endpoint.receive(0.0, self._awake)
        self._asleep = True  # before the look at the queue, as in `get`
        while self._reads is not None and (item := self.get(0)) is not None:
            try:
                self._take(item)
            except Exception:  # a mistake in one item keeps no other one waiting
                log.exception("cannot take a %s in", type(item).__name__)

    def close(self) -> None:
        """Read no more; the endpoint does this, too, when it closes. Idempotent."""
        if self._reads is not None:
            self._loop.remove_reader(self._reads)
        if self._tick is not None:
            self._tick.cancel()
        self._reads = self._tick = None


class Endpoint:
    """Where this process receives, and from where it connects to others.

    What arrives is read by a thread made here, or by the owner of the mailbox where that is a `SocketMailbox`. host is
    the address for tcp from other nodes, None for this node only. lost_after_s is the silence after which a peer that
    has sent something counts as lost; None never judges.
    """

    def __init__(
        self, mailbox: Mailbox, *, host: str | None = None, node_id: str = "", lost_after_s: float | None = None
    ) -> None:
        self.traffic = Traffic()
        self._mailbox = mailbox
        self._peers = Peers(mailbox)
        self._node_id = node_id
        self._lost_after_s = lost_after_s
        self._tick_s = _TICK_S if lost_after_s is None else min(_TICK_S, lost_after_s / 4)
        self._looked_at = time.monotonic()
        self._listens_again_at: float | None = None
        self._told_of_files = False
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._closed = False
        self._channels: list[SocketChannel] = []
        self._listeners: list[socket.socket] = []
        self._folder = tempfile.mkdtemp(prefix="specserve-")  # mode 0700
        try:
            self._ipc, self._tcp = self._listen(host)
        except BaseException:
            self._close_sockets()
            raise
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for each in (*self._listeners, self._woken):
            self._selector.register(each, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        if isinstance(mailbox, SocketMailbox):
            mailbox.read_from(self)
        else:
            self._thread = threading.Thread(target=self._receive_loop, name="specserve-receive", daemon=True)
            self._thread.start()

    def _listen(self, host: str | None) -> tuple[str, tuple[str, int] | None]:
        path = os.path.join(self._folder, "in")
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise ChannelError(f"{path} is too long for a socket; set TMPDIR to a shorter folder")
        try:
            self._listeners.append(listening(path))
            if host is None:
                return path, None
            self._listeners.append(listening((host, 0)))
        except OSError as error:
            raise ChannelError(f"cannot listen on {host or path}: {error}") from None
        return path, (host, self._listeners[-1].getsockname()[1])

    # ---- peers --------------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> Counter[str]:
        """Refused messages by reason."""
        return self._peers.dropped

    def fileno(self) -> int:
        """What becomes readable when there is something to `receive`."""
        return self._selector.fileno()

    def accept(self, peer: str, life: int) -> Address:
        """Let `peer` send here in this life; an earlier life of the same peer ends without a word."""
        reader = None if self._thread is None else self._thread.native_id
        return Address(self._node_id, self._ipc, self._tcp, self._peers.accept(peer, life), life, reader)

    def expect(self, peer: str) -> None:
        """Count the silence of an accepted peer from now on, even before its first word."""
        self._peers.expect(peer)

    def watch(self, channel: SocketChannel, peer: str, life: int) -> None:
        """Count an accepted peer as lost in the moment in which the channel to it breaks, if it is on this node.

        There a connection breaks only with a process, after the thread that reads from it. One between nodes may be
        made again, and its silence is judged. Nothing is told of a side that cannot be reached, nor of a channel that
        is closed here.
        """
        stream = channel.ends() if channel.local else None
        if stream is not None:
            for end in (channel.reader_ends(stream), stream):
                self._watch(end, channel, lambda: self._peers.broken(peer, life))

    def watch_process(self, channel: SocketChannel, peer: str, life: int) -> None:
        """As `watch`, for a peer that may connect again: it is lost only if its process is found dead.

        Where the process lives, or is on another node, its silence is judged.
        """

        def ended() -> None:
            try:
                again = channel.reopened()
            except ConnectionRefusedError:
                self._peers.died(peer, life)
            else:
                self._watch(again, channel, ended)

        if channel.local:
            self._watch(channel.ends(), channel, ended)

    def _watch(self, end: socket.socket | ThreadEnd | None, channel: SocketChannel, ended: Callable[[], None]) -> None:
        if end is not None:
            self._selector.register(_Watched(end, channel, ended), selectors.EVENT_READ)

    def forget(self, peer: str) -> None:
        """Take nothing more from this peer and do not report its loss. Unknown peers are fine."""
        self._peers.forget(peer)

    def progress(self, peer: str) -> tuple[int, bool] | None:
        """What the last beat of a peer said: finished batches, and whether one is being computed."""
        state = self._peers.get(peer)
        return None if state is None else (state.progress, state.busy)

    def connect(self, address: Address, peer: str = "peer") -> SocketChannel:
        """A channel to another endpoint, whose traffic is counted under the peer's name.

        Raises ChannelError if that one is on another node and has no tcp address.
        """
        target = address.ipc if address.node_id == self._node_id else address.tcp
        if target is None:
            raise ChannelError(f"the peer on node {address.node_id!r} listens on its own node only")
        with self._lock:
            if self._closed:
                raise ChannelError("this endpoint is closed")
            channel = SocketChannel(Outgoing(target), address, peer, self.traffic)
            self._channels = [known for known in self._channels if not known.closed] + [channel]
        return channel

    def close(self) -> None:
        """Stop receiving, close every channel made here, remove the socket's file. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if isinstance(self._mailbox, SocketMailbox):
            self._mailbox.close()
        self.wake()
        if self._thread is not None:
            self._thread.join()
        for channel in self._channels:
            channel.close()
        with self._reading:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, Incoming | _Watched):
                    key.fileobj.close()
            self._selector.close()
            self._close_sockets()
            self._waker.close()
            self._woken.close()

    def _close_sockets(self) -> None:
        for listener in self._listeners:
            listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- receiving ----------------------------------------------------------------------------------------------

    def _receive_loop(self) -> None:
        while self.receive(self._tick_s):
            pass

    def wake(self) -> None:
        """End the wait of whoever is in `receive`, from any thread."""
        with contextlib.suppress(OSError):  # it is woken many times already, or closed
            self._waker.send(b"w")

    def receive(self, timeout_s: float, awake: Callable[[], None] = lambda: None) -> bool:
        """Take what is there, after a wait of at most timeout_s (and a fraction of a second) for it. False once closed.

        awake is called as soon as there is nothing to wait for any more.
        """
        with self._reading:
            if self._closed:
                awake()
                return False
            ready = self._selector.select(min(timeout_s, self._tick_s))
            awake()
            for key, _ in ready:
                self._look_at(key.fileobj)
            now = time.monotonic()
            if self._listens_again_at is not None and now >= self._listens_again_at:
                self._listens_again_at = None
                for listener in self._listeners:
                    self._selector.register(listener, selectors.EVENT_READ)
            if self._lost_after_s is not None and now - self._looked_at > self._tick_s / 2:
                self._peers.judge_silence(self._lost_after_s, paused_s=now - self._looked_at - 2 * self._tick_s)
                self._looked_at = now
            return not self._closed

    def _look_at(self, ready: object) -> None:
        if isinstance(ready, Incoming):
            self._read(ready)
        elif isinstance(ready, _Watched):
            self._selector.unregister(ready)
            ready.close()
            if not ready.channel.closed:
                ready.ended()
        elif ready is self._woken:
            self._woken.recv(4096)
        elif isinstance(ready, socket.socket):
            try:
                self._selector.register(Incoming(ready.accept()[0]), selectors.EVENT_READ)
            except OSError as error:
                if error.errno in _EXHAUSTED and self._listens_again_at is None:
                    self._rest_from_listening(error)
                # else it came and went

    def _rest_from_listening(self, error: OSError) -> None:
        """Who waits to be accepted stays readable for ever; looking at that without end would help nobody."""
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._listens_again_at = time.monotonic() + _TICK_S
        if not self._told_of_files:
            self._told_of_files = True
            log.warning("no connection can be accepted now: %s; raise the limit on open files (ulimit -n)", error)

    def _read(self, stream: Incoming) -> None:
        try:
            for frames in stream.read():
                self._take(frames)
            return
        except ProtocolError:
            self.dropped["framing"] += 1
        except EOFError:
            pass  # whether that peer is missed is for its silence to say
        self._selector.unregister(stream)
        stream.close()

    def _take(self, frames: Sequence[Buffer]) -> None:
        peer = self._peers.admit(frames[0])
        if peer is None:
            return
        began = time.perf_counter()
        try:
            message = unpack(frames[1:])
        except ProtocolError:
            self.dropped["damaged"] += 1
            return
        self.traffic.received(peer.name, message, frames[1:], time.perf_counter() - began)
        if isinstance(message, Beat):
            peer.progress, peer.busy = message.progress, message.busy
        else:
            self._mailbox.put(Arrived(peer.name, peer.life, message))


class Heart:
    """A thread that sends a `Beat` every interval_s seconds on a channel of its own.

    status returns (finished batches, whether one is being computed) and is called in that thread.
    """

    def __init__(self, channel: SocketChannel, interval_s: float, status: Callable[[], tuple[int, bool]]) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._status = status
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="specserve-heart", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while True:
            # A peer that takes nothing any more is for others to judge; a heart just tries again.
            with contextlib.suppress(ChannelError):
                self._channel.send(Beat(*self._status()))
            if self._stopped.wait(self._interval_s):
                return

    def stop(self) -> None:
        """Stop beating, from any thread and without waiting."""
        self._stopped.set()

    def close(self) -> None:
        """Stop beating and close the channel. Idempotent."""
        self._stopped.set()
        self._thread.join()
        self._channel.close()
