"""Who may send to this process, in which life, and who has gone silent. Knows frames' headers, no sockets.

Frame 0 of every message is a fixed header, network byte order:

    magic 4s | version u8 | nonce 16s | life u32 | sender u32 | sequence u64

A nonce is made for one life of one peer and is told to that peer only. A sender is one channel; its messages are
numbered from 0. The wire keeps order, so a gap means that something was lost with a connection, and the life ends.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from specserve.transport import Mailbox, PeerLost
from specserve.transport.messages import Buffer

HEADER = struct.Struct("!4sB16sIIQ")
MAGIC = b"spsv"
VERSION = 1

_REMEMBERED_NONCES = 1024


@dataclass(slots=True)
class Peer:
    """One accepted life of a peer."""

    name: str
    life: int
    seen_at: float | None = None
    progress: int = 0
    busy: bool = False
    lost: bool = False
    expected: dict[int, int] = field(default_factory=dict)  # sender -> next sequence number


class Peers:
    """The accepted peers of one endpoint. Used from its receive thread and from the owner's threads."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.dropped: Counter[str] = Counter()
        self._mailbox = mailbox
        self._by_nonce: dict[bytes, Peer] = {}
        self._nonces: dict[str, bytes] = {}
        self._retired: dict[bytes, None] = {}
        self._lock = threading.Lock()

    def accept(self, name: str, life: int) -> bytes:
        """A nonce for this life of the peer; an earlier life ends without a word."""
        nonce = secrets.token_bytes(16)
        with self._lock:
            self._retire(name)
            self._by_nonce[nonce] = Peer(name, life)
            self._nonces[name] = nonce
        return nonce

    def expect(self, name: str) -> None:
        """Count the silence of this peer from now on."""
        peer = self.get(name)
        if peer is not None:
            peer.seen_at = time.monotonic()

    def forget(self, name: str) -> None:
        """Take nothing more from this peer and do not report its loss. Unknown peers are fine."""
        with self._lock:
            self._retire(name)

    def _retire(self, name: str) -> None:
        nonce = self._nonces.pop(name, None)
        if nonce is not None:
            del self._by_nonce[nonce]
            self._retired[nonce] = None
            while len(self._retired) > _REMEMBERED_NONCES:
                self._retired.pop(next(iter(self._retired)))

    def get(self, name: str) -> Peer | None:
        """The current life of a peer."""
        with self._lock:
            return self._by_nonce.get(self._nonces.get(name, b""))

    def admit(self, header: Buffer) -> Peer | None:
        """The peer that may say what follows this header, or None after counting in `dropped` why not."""
        with self._lock:
            found = self._judge(header)
            if isinstance(found, Peer):
                found.seen_at = time.monotonic()
                return found
            self.dropped[found] += 1
            return None

    def _judge(self, header: Buffer) -> Peer | str:
        """The peer, or the reason to refuse."""
        if len(header) != HEADER.size:
            return "header"
        magic, version, nonce, life, sender, sequence = HEADER.unpack(header)
        if magic != MAGIC or version != VERSION:
            return "header"
        peer = self._by_nonce.get(nonce)
        if peer is None:
            return "old life" if nonce in self._retired else "nonce"
        return "old life" if peer.life != life or peer.lost else self._in_order(peer, sender, sequence)

    def _in_order(self, peer: Peer, sender: int, sequence: int) -> Peer | str:
        expected = peer.expected.get(sender, 0)
        if sequence < expected:
            return "repeated"
        if sequence > expected:
            self._lose(peer, f"{sequence - expected} message(s) of {peer.name} were lost on the way")
            return "gap"
        peer.expected[sender] = sequence + 1
        return peer

    def _lose(self, peer: Peer, reason: str, *, gone: bool = False) -> None:
        peer.lost = True
        self._mailbox.put(PeerLost(peer.name, peer.life, reason, gone))

    def broken(self, name: str, life: int) -> None:
        """The connection to this life of a peer broke, which is its end."""
        self._end(name, life, f"the connection to {name} broke", gone=False)

    def died(self, name: str, life: int) -> None:
        """The process of this life of a peer is dead."""
        self._end(name, life, f"the process of {name} is dead", gone=True)

    def _end(self, name: str, life: int, reason: str, *, gone: bool) -> None:
        with self._lock:
            peer = self._by_nonce.get(self._nonces.get(name, b""))
            if peer is not None and peer.life == life and not peer.lost:
                self._lose(peer, reason, gone=gone)

    def judge_silence(self, lost_after_s: float, paused_s: float) -> None:
        """Report peers not heard of for lost_after_s, once per life; it counts from the first word, or from `expect`.

        paused_s is time in which this process did not listen; it does not count against anybody.
        """
        now = time.monotonic()
        with self._lock:
            for peer in self._by_nonce.values():
                if peer.lost or peer.seen_at is None:
                    continue
                peer.seen_at += max(0.0, paused_s)
                if now - peer.seen_at > lost_after_s:
                    reason = f"no sign of life from {peer.name} for {now - peer.seen_at:.1f} s"
                    self._lose(peer, reason, gone=True)
