"""Each fault does what it says to a process, and nothing of it is left when it is over."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from specserve.bench.faults import KINDS, alive, go_on, titled
from specserve.cluster.session import WorkerSession
from specserve.errors import ConfigError
from specserve.transport import Mailbox, PeerLost
from specserve.transport.messages import Cancel, Close
from specserve.transport.socket import Address, Endpoint

COUNTER = """
import sys, time
print("ready", flush=True)
number = 0
while True:
    number += 1
    time.sleep(0.001)
    print(number, flush=True)
"""

HUNGRY = """
import time
print("ready", flush=True)
while True:
    try:
        taken = bytearray(256 * 1024 * 1024)
        print("there", flush=True)
    except MemoryError:
        print("none", flush=True)
    time.sleep(0.02)
"""

PEER = """
import ast, sys
from specserve.cluster.session import WorkerSession
from specserve.transport.messages import Cancel
from specserve.transport.socket import Address

class Echo:
    def handle(self, message):
        return [Cancel(str(message.row))]

session = WorkerSession(Echo(), Address(*ast.literal_eval(sys.argv[1])), 0, host=None, node_id="", heartbeat_s=0.05)
print(session.address.ipc, session.address.nonce.hex(), flush=True)
sys.stdin.read()
"""


class Child:
    """A process of its own whose lines are kept."""

    def __init__(self, code: str, *arguments: str) -> None:
        command = [sys.executable, "-u", "-c", code, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline().strip()
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


def inflicted(kind: str, pid: int, seconds: float) -> threading.Thread:
    """The fault, in a thread of its own."""
    thread = threading.Thread(target=KINDS[kind], args=(pid, seconds))
    thread.start()
    return thread


def test_kill_ends_a_process() -> None:
    """At once; a zombie does not count as alive, nor does a number that nobody has."""
    with Child(COUNTER) as child:
        assert alive(child.pid)
        KINDS["kill"](child.pid, 1)
        until(lambda: not alive(child.pid))
    assert not alive(2**22 + 1)


def test_stop_lasts_until_the_process_may_go_on() -> None:
    """It does nothing more until then; letting go of one that somebody has ended is harmless."""
    with Child(COUNTER) as child:
        until(lambda: len(child.lines) > 3)
        KINDS["stop"](child.pid, 0)
        until(lambda: stands_still(child))
        assert alive(child.pid)
        go_on(child.pid)
        until(lambda: not stands_still(child))
    go_on(child.pid)


def stands_still(child: Child) -> bool:
    before = len(child.lines)
    time.sleep(0.2)
    return len(child.lines) == before


def test_slow_is_slower_and_over_when_it_is_over() -> None:
    """The process goes on meanwhile, and runs freely afterwards."""
    with Child(COUNTER) as child:
        until(lambda: len(child.lines) > 3)
        before = len(child.lines)
        KINDS["slow"](child.pid, 0.5)
        assert len(child.lines) > before
        assert not stands_still(child)


def test_starve_makes_real_allocations_fail() -> None:
    """Memory that was there is refused by the system, and there again afterwards."""
    with Child(HUNGRY) as child:
        until(lambda: "there" in child.lines)
        allowed("starve", child.pid, 0.5)
        assert "none" in child.lines
        until(lambda: child.lines[-1] == "there")


def allowed(kind: str, pid: int, seconds: float) -> None:
    """Inflict it, or skip the test where this user may not."""
    try:
        KINDS[kind](pid, seconds)
    except ConfigError as error:
        pytest.skip(error.message)


def test_cut_lets_no_message_through_and_both_sides_live() -> None:
    """What is sent meanwhile is not answered, and the loss is noticed; the process itself is well."""
    mailbox = Mailbox()
    here = Endpoint(mailbox, lost_after_s=0.6)
    try:
        address = here.accept("target", 0)
        with Child(PEER, repr(("", address.ipc, None, address.nonce, 0))) as child:
            path, nonce = child.first.split()
            channel = here.connect(Address("", path, None, bytes.fromhex(nonce), 0))
            here.expect("target")
            channel.send(Close(1))
            item = mailbox.get(10)
            assert item is not None
            assert item.message == Cancel("1")
            fault = threading.Thread(target=allowed, args=("cut", child.pid, 3.0))
            fault.start()
            lost = mailbox.get(10)
            fault.join()
            assert isinstance(lost, PeerLost)
            assert alive(child.pid)
    finally:
        here.close()


def test_processes_are_found_by_a_word_of_their_title() -> None:
    """Those below this one only."""
    with Child(COUNTER, "a-word-of-its-own") as child:
        assert titled("a-word-of-its-own") == [child.pid]
    assert titled("a-word-of-its-own") == []


def test_a_session_is_what_is_cut() -> None:
    """The stand-in above is the class that workers run."""
    assert WorkerSession.__module__ in PEER
