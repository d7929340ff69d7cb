"""What a process does until it can serve gives way; what serves afterwards does not (see test_cluster.py)."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from priorities import niceness

from specserve.cluster.giving_way import NICENESS, giving_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")


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
