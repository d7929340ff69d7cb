"""How far two processes are apart: a few round trips over TCP, before any request waits for such a link."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from dataclasses import dataclass

from specserve.errors import Unavailable

_ROUND_TRIPS = 20
_BULK_ROUND_TRIPS = 3
_NONCE_BYTES = 16
_SMALL_BYTES = 64
_BULK_BYTES = 1 << 18  # the chains of a large batch with sparse dists
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class EchoAddress:
    """Where an `Echo` waits. nonce is 16 bytes; who does not bring it gets no answer."""

    node_id: str
    host: str
    port: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Link:
    """One way between two nodes: the best round trip of a small message, and of 256 KiB, in seconds."""

    here: str
    there: str
    round_trip_s: float
    bulk_s: float

    def warning(self, role: str, slow_link_s: float) -> str | None:
        """What to tell people about a link that is slower than they allow; None for a good one."""
        if self.round_trip_s < slow_link_s:
            return None
        return (
            f"the {role} worker on {self.here} is {1000 * self.round_trip_s:.1f} ms away from the coordinator on "
            f"{self.there} ({1000 * self.bulk_s:.1f} ms for 256 KiB, there and back), and every round waits for that; "
            f"place them nearer (cluster.placement PACK or STRICT_PACK, or resources of nodes in one zone), or raise "
            f"cluster.slow_link_s = {slow_link_s:g} if this is meant"
        )

    def warning_of_rank(self, name: str, slow_link_s: float) -> str | None:
        """As `warning`, for a rank that is on another node than the rank that leads it."""
        if self.round_trip_s < slow_link_s:
            return None
        return (
            f"{name} on {self.here} is {1000 * self.round_trip_s:.2f} ms away from its rank 0 on {self.there}, and "
            f"every layer of every step waits for that twice; put the ranks on one node (rank_placement STRICT_PACK), "
            f"or raise cluster.slow_link_s, of which a tenth is allowed here, if this is meant"
        )


class Echo:
    """Sends back what one peer sends, once, in a thread of its own; gives up after a few seconds."""

    def __init__(self, host: str, node_id: str) -> None:
        self._listener = socket.create_server((host, 0), family=_family(host))
        self._listener.settimeout(_TIMEOUT_S)
        port = self._listener.getsockname()[1]
        self.address = EchoAddress(node_id, host, port, secrets.token_bytes(_NONCE_BYTES))
        threading.Thread(target=self._serve, name="specserve-echo", daemon=True).start()

    def _serve(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            with peer:
                _prepare(peer)
                if hmac.compare_digest(_received(peer, _NONCE_BYTES), self.address.nonce):
                    for size in _sizes():
                        peer.sendall(_received(peer, size))


def measure(here: str, to: EchoAddress) -> Link:
    """The link from this process, on host `here`, to an `Echo`. Raises Unavailable when there is no answer."""
    try:
        with socket.create_connection((to.host, to.port), timeout=_TIMEOUT_S) as peer:
            _prepare(peer)
            peer.sendall(to.nonce)
            taken_s = [_round_trip(peer, size) for size in _sizes()]
    except OSError as error:
        raise Unavailable(f"{to.host} port {to.port} does not answer from {here}: {error}") from None
    return Link(here, to.host, min(taken_s[:_ROUND_TRIPS]), min(taken_s[_ROUND_TRIPS:]))


def _sizes() -> list[int]:
    return [_SMALL_BYTES] * _ROUND_TRIPS + [_BULK_BYTES] * _BULK_ROUND_TRIPS


def _round_trip(peer: socket.socket, size: int) -> float:
    began = time.perf_counter()
    peer.sendall(bytes(size))
    _received(peer, size)
    return time.perf_counter() - began


def _received(peer: socket.socket, size: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < size:
        piece = peer.recv(size - len(pieces))
        if not piece:
            raise ConnectionError("the peer left")
        pieces += piece
    return bytes(pieces)


def _prepare(peer: socket.socket) -> None:
    peer.settimeout(_TIMEOUT_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
