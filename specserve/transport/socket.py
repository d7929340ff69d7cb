"""Messages between processes over ZMQ PUSH/PULL: ipc on one node, tcp across nodes. Nothing is ever unpickled.

An `Endpoint` is where a process receives: one PULL socket, one thread. A peer may send to it after `accept` gave out
an `Address` with a nonce made for that peer and life; the address travels by some other way (a Ray actor call).

Frame 0 of every message is the header of `peers`, the rest is what `messages.pack` made.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from specserve.errors import ChannelError, ProtocolError
from specserve.transport import Arrived, Mailbox
from specserve.transport.messages import Beat, Buffer, Message, pack, unpack
from specserve.transport.peers import HEADER, MAGIC, VERSION, Peers
from specserve.transport.traffic import Traffic

_LONGEST_IPC_PATH = 100  # bytes; the kernel's limit for the path of a socket is 107
_LARGE_FRAME = 65536  # bytes; from here on a copy costs more than keeping ZMQ's own buffer alive
_LARGEST_FRAME = 1 << 30
_SMALL_FRAMES = 3  # header, head and small arrays, in front of the large ones
_MESSAGES_UNDERWAY = 4096


@dataclass(frozen=True, slots=True)
class Address:
    """Where and as whom to send. node_id decides between `ipc` and `tcp`; nonce is 16 bytes, for this life only."""

    node_id: str
    ipc: str
    tcp: str | None
    nonce: bytes
    life: int


class SocketChannel:
    """The sending end of a conversation. Made by `Endpoint.connect`; safe to close from any thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], url: str, nonce: bytes, life: int, peer: str, traffic: Traffic
    ) -> None:
        self._peer = peer
        self._traffic = traffic
        self._nonce = nonce
        self._life = life
        self._sender = secrets.randbits(32)
        self._sequence = 0
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MESSAGES_UNDERWAY)
        self._socket.connect(url)
        self.local = url.startswith("ipc:")

    def send(self, message: Message) -> None:
        """Queue a message. Never blocks; raises ChannelError when the peer takes nothing any more, or after `close`.

        Arrays of the message must not be written to afterwards: large ones are not copied.
        """
        began = time.perf_counter()
        frames = pack(message)
        packing_s = time.perf_counter() - began
        with self._lock:
            header = HEADER.pack(MAGIC, VERSION, self._nonce, self._life, self._sender, self._sequence)
            try:
                self._send([header, *frames])
            except zmq.Again:
                raise ChannelError(f"the peer has {_MESSAGES_UNDERWAY} messages unread; it is gone or stuck") from None
            except zmq.ZMQError as error:
                raise ChannelError(f"cannot send {type(message).__name__}: {error}") from None
            self._sequence += 1
        self._traffic.sent(self._peer, message, frames, packing_s)

    def _send(self, frames: Sequence[Buffer]) -> None:
        # A small frame that is not copied costs an object with a lock and two callbacks.
        for frame in frames[:-1]:
            self._socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE, copy=len(frame) < _LARGE_FRAME)
        self._socket.send(frames[-1], zmq.NOBLOCK, copy=len(frames[-1]) < _LARGE_FRAME)

    def on_disconnect(self, tell: Callable[[], None]) -> None:
        """Call this, once and from a thread of its own, when the other side closes the connection or dies.

        Nothing is told of a side that cannot be reached, and on another node of one that was cut off.
        """
        told_by = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        threading.Thread(
            target=_listen, args=(told_by, tell, lambda: self.closed), name="specserve-disconnect", daemon=True
        ).start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._socket.closed)

    def close(self) -> None:
        """Drop what is not sent yet and release the socket. Idempotent."""
        with self._lock:
            self._socket.close(linger=0)


def _listen(told_by: zmq.Socket[bytes], tell: Callable[[], None], closed: Callable[[], bool]) -> None:
    """Until the monitored socket is closed."""
    with told_by, contextlib.suppress(zmq.ContextTerminated):
        told = False
        while (event := recv_monitor_message(told_by)["event"]) != zmq.EVENT_MONITOR_STOPPED:
            if event == zmq.EVENT_DISCONNECTED and not told and not closed():
                told = True
                tell()


class Endpoint:
    """Where this process receives, and from where it connects to others.

    host is the address for tcp from other nodes, None for this node only. lost_after_s is the silence after which a
    peer that has sent something counts as lost; None never judges.
    """

    def __init__(
        self, mailbox: Mailbox, *, host: str | None = None, node_id: str = "", lost_after_s: float | None = None
    ) -> None:
        self.traffic = Traffic()
        self._mailbox = mailbox
        self._peers = Peers(mailbox)
        self._node_id = node_id
        self._lost_after_s = lost_after_s
        self._stop_word = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._closed = False
        self._channels: list[SocketChannel] = []
        self._folder = tempfile.mkdtemp(prefix="specserve-")  # mode 0700
        self._context = zmq.Context()
        try:
            self._socket = self._bind(host)
        except BaseException:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._thread = threading.Thread(target=self._receive_loop, name="specserve-receive", daemon=True)
        self._thread.start()

    def _bind(self, host: str | None) -> zmq.Socket[bytes]:
        path = os.path.join(self._folder, "in")
        if len(os.fsencode(path)) > _LONGEST_IPC_PATH:
            raise ChannelError(f"{path} is too long for a socket; set TMPDIR to a shorter folder")
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_FRAME)
        socket.setsockopt(zmq.RCVHWM, _MESSAGES_UNDERWAY)
        self._wake_url = f"inproc://{secrets.token_hex(8)}"
        self._ipc = f"ipc://{path}"
        self._tcp: str | None = None
        try:
            socket.bind(self._wake_url)
            socket.bind(self._ipc)
            if host is not None:
                shown = f"[{host}]" if ":" in host else host
                socket.setsockopt(zmq.IPV6, int(":" in host))
                self._tcp = f"tcp://{shown}:{socket.bind_to_random_port(f'tcp://{shown}')}"
        except zmq.ZMQError as error:
            raise ChannelError(f"cannot listen on {host or path}: {error}") from None
        return socket

    # ---- peers --------------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> Counter[str]:
        """Refused messages by reason."""
        return self._peers.dropped

    def accept(self, peer: str, life: int) -> Address:
        """Let `peer` send here in this life; an earlier life of the same peer ends without a word."""
        return Address(self._node_id, self._ipc, self._tcp, self._peers.accept(peer, life), life)

    def expect(self, peer: str) -> None:
        """Count the silence of an accepted peer from now on, even before its first word."""
        self._peers.expect(peer)

    def watch(self, channel: SocketChannel, peer: str, life: int) -> None:
        """Count an accepted peer as lost in the moment in which the channel to it breaks, if it is on this node.

        There a connection breaks only with a process. One between nodes may be made again, and its silence is judged.
        """
        if channel.local:
            channel.on_disconnect(lambda: self._peers.broken(peer, life))

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
        url = address.ipc if address.node_id == self._node_id else address.tcp
        if url is None:
            raise ChannelError(f"the peer on node {address.node_id!r} listens on its own node only")
        with self._lock:
            if self._closed:
                raise ChannelError("this endpoint is closed")
            channel = SocketChannel(self._context, url, address.nonce, address.life, peer, self.traffic)
            self._channels = [known for known in self._channels if not known.closed] + [channel]
        return channel

    def close(self) -> None:
        """Stop receiving, close every channel made here, remove the socket's file. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        wake = self._context.socket(zmq.PUSH)
        wake.connect(self._wake_url)
        wake.send(self._stop_word)
        self._thread.join()
        wake.close(linger=0)
        for channel in self._channels:
            channel.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- the receive thread -------------------------------------------------------------------------------------

    def _receive_loop(self) -> None:
        tick_s = 0.2 if self._lost_after_s is None else min(0.2, self._lost_after_s / 4)
        looked_at = time.monotonic()
        while True:
            if self._socket.poll(int(tick_s * 1000) or 1) and self._drain():
                break
            if self._lost_after_s is not None:
                self._peers.judge_silence(self._lost_after_s, paused_s=time.monotonic() - looked_at - 2 * tick_s)
            looked_at = time.monotonic()
        self._socket.close(linger=0)

    def _drain(self) -> bool:
        """Take what is there; true when it was time to stop."""
        while True:
            try:
                frames = self._receive()
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                self.dropped[f"receive error {error.errno}"] += 1
                return False
            if len(frames) == 1 and frames[0] == self._stop_word:
                return True
            self._take(frames)

    def _receive(self) -> list[Buffer]:
        """One message. Its large arrays stay in ZMQ's own buffers. Raises zmq.Again when there is none."""
        frames: list[Buffer] = [self._socket.recv(zmq.NOBLOCK)]
        while self._socket.get(zmq.RCVMORE):
            large = len(frames) >= _SMALL_FRAMES
            frames.append(self._socket.recv(copy=False).buffer if large else self._socket.recv())
        return frames

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
