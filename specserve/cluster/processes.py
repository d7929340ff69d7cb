"""The processes below this one, to make sure that none is left. Linux only; elsewhere nothing is found."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """A process; the start time tells it from a later one with the same number."""

    pid: int
    started: str

    def alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.started and found[2] != "Z"


def current() -> Process | None:
    """This process; None where the system has no /proc."""
    found = _stat(os.getpid())
    return None if found is None else Process(os.getpid(), found[1])


def descendants(pid: int | None = None) -> set[Process]:
    """All processes below `pid` (this process by default), at any depth."""
    children = defaultdict(list)
    for entry in _PROC.glob("[0-9]*"):
        found = _stat(int(entry.name))
        if found is not None:
            children[found[0]].append(Process(int(entry.name), found[1]))
    result: set[Process] = set()
    frontier = [os.getpid() if pid is None else pid]
    while frontier:
        below = [child for child in children[frontier.pop()] if child not in result]
        result.update(below)
        frontier.extend(child.pid for child in below)
    return result


def end(processes: set[Process], *, patience_s: float) -> set[Process]:
    """Wait for them, then ask them, then force them, patience_s seconds each time. Returns those still there."""
    left = _wait(processes, patience_s)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)
        left = _wait(left, patience_s)
    return left


def _wait(processes: set[Process], patience_s: float) -> set[Process]:
    deadline_s = time.monotonic() + patience_s
    left = {process for process in processes if process.alive()}
    while left and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        left = {process for process in left if process.alive()}
    return left


def _stat(pid: int) -> tuple[int, str, str] | None:
    """(parent, start time, state) of a process, None when it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[1]), fields[19], fields[0]
