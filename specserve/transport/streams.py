"""Messages on a byte stream: frames behind their lengths, written by whoever sends and read by whoever computes.

A message on the stream, integers u32 in network byte order:

    count | size | count × length | frames, this list and each frame padded to 8 bytes

size counts the bytes behind itself. A stream that says anything else cannot be followed any further.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from specserve.errors import ChannelError, ProtocolError
from specserve.transport.messages import Buffer

MESSAGES_UNDERWAY = 4096
"""Messages that a sender keeps for a peer that does not read, or that got lost in a row, before it gives up."""

_HEAD = struct.Struct("!II")
_ALIGN = 8
_PADDING = [bytes(-size % _ALIGN) for size in range(_ALIGN)]
_LARGE_FRAME = 65536  # bytes; from here on a frame is not copied
_MOST_FRAMES = 64
_LARGEST_MESSAGE = 1 << 30
_AT_ONCE = 1 << 18  # bytes asked of the system in one call
_BUFFER_BYTES = 1 << 22  # asked of the system for what is sent and not read yet; it may give less
_LOOK_AGAIN_MS = 100

Target = str | tuple[str, int]
"""Where a stream leads: the path of a socket of this node, or a host and a port."""


def framed(frames: Sequence[Buffer]) -> list[Buffer]:
    """The bytes of a message. Small frames are copied into one piece, large ones are handed on as they are.

    Raises ChannelError for what no `Incoming` takes.
    """
    lengths = [len(frame) for frame in frames]
    size = sum(length + -length % _ALIGN for length in (4 * len(lengths), *lengths))
    if _excessive(len(lengths), size):
        raise ChannelError(
            f"a message of {len(lengths)} frames and {size} bytes cannot be sent: peers take 1 to {_MOST_FRAMES} "
            f"frames and at most {_LARGEST_MESSAGE} bytes; lower engine.max_batch_tokens or engine.max_requests"
        )
    listed = struct.pack(f"!{len(lengths)}I", *lengths)
    pieces: list[Buffer] = []
    small: list[Buffer] = [_HEAD.pack(len(lengths), size), listed, _PADDING[len(listed) % _ALIGN]]
    for frame, length in zip(frames, lengths, strict=True):
        if length >= _LARGE_FRAME:
            pieces += [b"".join(small), frame]
            small = [_PADDING[length % _ALIGN]]
        else:
            small += [frame, _PADDING[length % _ALIGN]]
    pieces.append(b"".join(small))
    return pieces


class Incoming:
    """The reading end of one stream. Used by one thread at a time."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        _without_delay(stream)
        self._stream = stream
        self._rest: Buffer = b""  # the beginning of a message that is not complete
        self._large: memoryview | None = None  # room for all of a message that does not come in one piece
        self._filled = 0

    def fileno(self) -> int:
        """The number of the stream's file, for selectors."""
        return self._stream.fileno()

    def close(self) -> None:
        """Drop what is not complete, and release the stream."""
        self._stream.close()

    def read(self) -> Iterator[list[Buffer]]:
        """The frames of every message that one look at the stream completes; none when nothing is there.

        Raises EOFError at the end of the stream, and ProtocolError when it cannot be followed.
        """
        try:
            if self._large is None:
                yield from self._split(self._received())
            else:
                yield from self._filling(self._large)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError(f"the stream broke: {error}") from None

    def _received(self) -> Buffer:
        data = self._stream.recv(_AT_ONCE)
        if not data:
            raise EOFError("the peer closed the stream")
        return b"".join((self._rest, data)) if self._rest else data

    def _filling(self, whole: memoryview) -> Iterator[list[Buffer]]:
        got = self._stream.recv_into(whole[self._filled :])
        if not got:
            raise EOFError("the peer closed the stream within a message")
        self._filled += got
        if self._filled == len(whole):
            self._large = None
            yield _frames(whole.toreadonly())

    def _split(self, data: Buffer) -> Iterator[list[Buffer]]:
        view, at = memoryview(data), 0
        self._rest = b""
        while len(view) - at >= _HEAD.size:
            whole = _HEAD.size + _size_of(view[at:])
            if len(view) - at < whole:
                break
            yield _frames(view[at : at + whole])
            at += whole
        self._keep(view[at:])

    def _keep(self, begun: memoryview) -> None:
        """Room for what is to come. A length that is a lie costs addresses, not memory: nobody writes there."""
        if len(begun) < _HEAD.size:
            self._rest = bytes(begun)
            return
        whole = np.empty(_HEAD.size + _size_of(begun), dtype=np.uint8).data
        whole[: len(begun)] = begun
        self._large, self._filled = whole, len(begun)


def _size_of(view: memoryview) -> int:
    """Bytes behind the head of a message. Raises ProtocolError."""
    count, size = _HEAD.unpack_from(view)
    if _excessive(count, size):
        raise ProtocolError(f"a message of {count} frames and {size} bytes")
    return int(size)


def _excessive(count: int, size: int) -> bool:
    return not 0 < count <= _MOST_FRAMES or size > _LARGEST_MESSAGE


def _frames(message: memoryview) -> list[Buffer]:
    """The frames of a complete message. Raises ProtocolError when their lengths are not its size."""
    (count, _), at = _HEAD.unpack_from(message), _HEAD.size
    if len(message) < at + 4 * count:
        raise ProtocolError(f"a message too short for {count} lengths")
    lengths = struct.unpack_from(f"!{count}I", message, at)
    at += 4 * count + -4 * count % _ALIGN
    frames: list[Buffer] = []
    for length in lengths:
        frames.append(message[at : at + length])
        at += length + -length % _ALIGN
    if at != len(message):
        raise ProtocolError(f"frames of {at} bytes in a message of {len(message)}")
    return frames


class Outgoing:
    """The writing end: what the system does not take at once, a thread of its own hands over later, in order.

    A stream that breaks is opened again by the next message. What was on its way is lost then, as is what is written
    while nobody listens: receivers see it by the numbers of messages, and their senders' owners by the silence.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.local = isinstance(target, str)
        self._lock = threading.Lock()
        self._stream: socket.socket | None = None
        self._waiting: deque[list[Buffer]] = deque()
        self._lost = 0  # messages since the peer's system last took something
        self._handing_over: threading.Thread | None = None
        self.closed = False
        with self._lock:
            self._open()

    def write(self, make: Callable[[], list[Buffer]]) -> None:
        """Send the message that `make` makes when it is this one's turn. Never blocks.

        Raises ChannelError after `close`, and when too many messages are unread or lost; the message is not taken then.
        """
        with self._lock:
            if self.closed:
                raise ChannelError("the channel is closed")
            if len(self._waiting) + self._lost >= MESSAGES_UNDERWAY:
                raise ChannelError(f"the peer has {MESSAGES_UNDERWAY} messages unread; it is gone or stuck")
            message = make()
            if self._waiting:
                self._waiting.append(message)
            else:
                self._begin(message)

    def _begin(self, message: list[Buffer]) -> None:
        for _ in range(2):
            if self._stream is None and not self._open():
                break
            left = self._taken(message)
            if left is None:  # the stream was broken before this message: it may go on a new one, whole
                continue
            if left:
                self._wait_with(left)
            return
        self._lost += 1

    def _taken(self, pieces: list[Buffer]) -> list[Buffer] | None:
        """Hand over what the system takes now; the rest of it, or None when the stream is broken, and was dropped."""
        assert self._stream is not None
        try:
            sent = self._stream.sendmsg(pieces, [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return pieces
        except OSError:
            self._drop()
            return None
        self._lost = 0
        return _behind(pieces, sent)

    def _wait_with(self, message: list[Buffer]) -> None:
        self._waiting.append(message)
        if self._handing_over is None:
            self._handing_over = threading.Thread(target=self._hand_over, name="specserve-send", daemon=True)
            self._handing_over.start()

    def _hand_over(self) -> None:
        """Write what waits, as the peer reads; ends when nothing does."""
        while True:
            with self._lock:
                while self._waiting and self._stream is not None:
                    left = self._taken(self._waiting[0])
                    if left is None:
                        self._lost += len(self._waiting)
                        self._waiting.clear()
                    elif left:
                        self._waiting[0] = left
                        break
                    else:
                        self._waiting.popleft()
                if self._stream is None or not self._waiting:
                    self._handing_over = None
                    return
                poll = select.poll()
                poll.register(self._stream, select.POLLOUT)
            poll.poll(_LOOK_AGAIN_MS)

    def _open(self) -> bool:
        """Connect, or begin to, without waiting. False when nobody listens, or this process has no files left."""
        self._connect()
        return self._stream is not None

    def _connect(self) -> int:
        """As `_open`; what the system said to it."""
        family = socket.AF_UNIX if isinstance(self._target, str) else _family(self._target[0])
        try:
            stream = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            return error.errno or errno.EMFILE
        stream.setblocking(False)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        _without_delay(stream)
        try:
            begun = stream.connect_ex(self._target)
        except OSError:  # a path that cannot be one, or a host without an address
            begun = errno.ENOENT
        if begun not in (0, errno.EINPROGRESS):
            stream.close()
        else:
            self._stream = stream
        return begun

    def ends(self) -> socket.socket | None:
        """Another handle on the stream, which becomes readable when the stream ends.

        None when nobody listens, or this process has no files left.
        """
        with self._lock, contextlib.suppress(OSError):
            return None if self._stream is None else self._stream.dup()
        return None

    def reopened(self) -> socket.socket | None:
        """As `ends`, of a stream in place of one that broke.

        Raises ConnectionRefusedError where nobody listens though the socket's file is there: its process is dead.
        """
        with self._lock:
            if self.closed:
                return None
            self._drop()
            self._lost += len(self._waiting)  # of the first a part may be sent: no other stream can have the rest
            self._waiting.clear()
            if self._connect() == errno.ECONNREFUSED:
                raise ConnectionRefusedError(f"nobody listens at {self._target} any more")
        return self.ends()

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        """Drop what the system did not take yet and release the stream. Idempotent."""
        with self._lock:
            self.closed = True
            self._waiting.clear()
            handing_over = self._handing_over
            if self._stream is not None:
                with contextlib.suppress(OSError):  # it is not connected
                    self._stream.shutdown(socket.SHUT_RDWR)  # wakes whoever hands over
            self._drop()
        if handing_over is not None and handing_over is not threading.current_thread():
            handing_over.join()


def _behind(pieces: list[Buffer], sent: int) -> list[Buffer]:
    """What is left of the pieces behind the first `sent` bytes."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:], *pieces[index + 1 :]]
        sent -= len(piece)
    return []


def listening(target: Target) -> socket.socket:
    """A socket that listens at a path, or at a host's free port where the port is 0. Raises OSError."""
    family = socket.AF_UNIX if isinstance(target, str) else _family(target[0])
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(target)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _without_delay(stream: socket.socket) -> None:
    if stream.family != socket.AF_UNIX:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
