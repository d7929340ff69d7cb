"""What a process does until it can serve gives way; what serves afterwards does not."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deployment import complete, pids, served

from specserve.cluster.giving_way import NICENESS, giving_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")


def niceness() -> int:
    """Of the thread that asks."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def threads_of(pid: int) -> dict[str, tuple[int, int]]:
    """(niceness, nanoseconds computed) of each thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        nice = int((task / "stat").read_text().rpartition(")")[2].split()[16])
        found[task.name] = nice, int((task / "schedstat").read_text().split()[0])
    return found


def test_only_the_work_gives_way():
    """It runs in a thread behind the others; this one, and those that it makes, are as before."""
    before = niceness()
    assert giving_way(niceness) == max(before, NICENESS)
    assert niceness() == before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(niceness).result() == before


def test_work_that_fails_raises_here():
    """What it raised."""

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        giving_way(fail)


@pytest.mark.ray
@pytest.mark.parametrize("role", ["target", "draft"])
def test_what_computes_answers_has_ordinary_priority(url, role):
    """Threads that libraries made for the start may be left, and do nothing."""
    pid = pids()[role]
    before = threads_of(pid)
    for _ in range(4):
        complete(url)
    computed = {name: (nice, took - before.get(name, (0, 0))[1]) for name, (nice, took) in threads_of(pid).items()}
    in_all = sum(took for _, took in computed.values())
    assert in_all > 0
    assert {nice for nice, took in computed.values() if took > in_all / 100} == {niceness()}


@pytest.fixture(scope="module")
def url(config, ray_here) -> Iterator[str]:
    """A deployment that has answered once."""
    with served(config) as address:
        complete(address)
        yield address
