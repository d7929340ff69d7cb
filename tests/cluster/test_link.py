"""Measuring how far two nodes are apart, and what is told about it."""

from __future__ import annotations

import dataclasses
import socket
import threading

import pytest

from specserve.cluster.link import Echo, EchoAddress, Link, measure
from specserve.errors import Unavailable

LINK = Link("10.0.0.3", "10.0.0.2", round_trip_s=0.0031, bulk_s=0.0092)


def test_an_echo_answers_one_peer_that_knows_the_nonce():
    """The bulk takes longer than nothing, the hosts are named, and the port is closed afterwards."""
    echo = Echo("127.0.0.1", "node")
    link = measure("127.0.0.1", echo.address)
    assert (link.here, link.there) == ("127.0.0.1", "127.0.0.1")
    assert link.round_trip_s > 0
    assert link.bulk_s > 0
    with pytest.raises(Unavailable, match="does not answer"):
        measure("127.0.0.1", echo.address)


def test_a_wrong_nonce_gets_no_answer():
    """Somebody else who finds the port learns nothing."""
    address = Echo("127.0.0.1", "node").address
    with pytest.raises(Unavailable, match=f"port {address.port} does not answer"):
        measure("127.0.0.1", dataclasses.replace(address, nonce=bytes(16)))


def test_a_peer_that_never_answers_is_given_up(monkeypatch):
    """A firewall that swallows everything must not keep a pipeline from starting."""
    monkeypatch.setattr("specserve.cluster.link._TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = EchoAddress("node", "127.0.0.1", silent.getsockname()[1], bytes(16))
        with pytest.raises(Unavailable, match="does not answer"):
            measure("127.0.0.1", address)


def test_a_delay_on_the_way_is_seen():
    """Through a relay that holds everything for 20 ms, no round trip is shorter than that."""
    echo = Echo("127.0.0.1", "node")
    with relay(echo.address, delay_s=0.02) as port:
        link = measure("127.0.0.1", dataclasses.replace(echo.address, port=port))
    assert link.round_trip_s >= 0.02
    assert link.warning("draft", slow_link_s=0.02) is not None


def test_the_warning_names_both_ends_the_times_and_what_to_change():
    """And a link within the limit is not worth a word."""
    told = LINK.warning("draft", slow_link_s=0.001)
    assert told is not None
    for part in ("draft worker on 10.0.0.3", "3.1 ms", "10.0.0.2", "9.2 ms", "STRICT_PACK", "cluster.slow_link_s"):
        assert part in told
    assert LINK.warning("draft", slow_link_s=0.0032) is None


def test_the_warning_of_a_rank_names_it_and_how_to_keep_ranks_together():
    """A tenth of what a worker may be away is far for a rank: every layer waits for its group."""
    told = LINK.warning_of_rank("target/1", slow_link_s=0.0001)
    assert told is not None
    for part in ("target/1 on 10.0.0.3", "3.10 ms", "10.0.0.2", "rank_placement STRICT_PACK", "cluster.slow_link_s"):
        assert part in told
    assert LINK.warning_of_rank("target/1", slow_link_s=0.0032) is None


class relay:
    """A TCP hop towards an echo that waits before it passes on what the client sent."""

    def __init__(self, to: EchoAddress, delay_s: float) -> None:
        self._to, self._delay_s = to, delay_s

    def __enter__(self) -> int:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._there = socket.create_connection((self._to.host, self._to.port))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self._listener.getsockname()[1]

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        back = threading.Thread(target=self._pass, args=(self._there, client, 0.0))
        back.start()
        self._pass(client, self._there, self._delay_s)
        back.join()
        client.close()

    def _pass(self, source: socket.socket, sink: socket.socket, delay_s: float) -> None:
        wait = threading.Event()
        while data := source.recv(65536):
            wait.wait(delay_s)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._there.close()
        self._listener.close()
