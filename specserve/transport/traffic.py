"""How much goes over the wire: messages and bytes by link and kind, and the time that packing takes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from specserve.transport.messages import Buffer, Message


class Traffic:
    """Counts of one process, for all its channels. Safe to use from any thread.

    A link is `to_` or `from_` a kind of peer: ingress-3f… and ingress-a0… are both "ingress".
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._packing_s: dict[str, float] = {}

    def sent(self, peer: str, message: Message, frames: Sequence[Buffer], packing_s: float) -> None:
        """Count a message on its way to a peer."""
        self._count("to_" + _kind_of(peer), message, frames, packing_s)

    def received(self, peer: str, message: Message, frames: Sequence[Buffer], packing_s: float) -> None:
        """Count a message that came from a peer."""
        self._count("from_" + _kind_of(peer), message, frames, packing_s)

    def _count(self, link: str, message: Message, frames: Sequence[Buffer], packing_s: float) -> None:
        size = sum(map(len, frames))
        key = (link, type(message).__name__.lower())
        with self._lock:
            counts = self._counts.setdefault(key, [0, 0])
            counts[0] += 1
            counts[1] += size
            self._packing_s[link] = self._packing_s.get(link, 0.0) + packing_s

    def totals(self) -> tuple[list[tuple[str, str, int, int]], dict[str, float]]:
        """(link, kind, messages, bytes) since the start, and seconds of packing and unpacking by link."""
        with self._lock:
            return [(link, kind, n, size) for (link, kind), (n, size) in self._counts.items()], dict(self._packing_s)


def _kind_of(peer: str) -> str:
    return peer.partition("-")[0]
