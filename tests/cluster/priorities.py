"""What priority the threads of a process have."""

from __future__ import annotations

import os
import threading
from pathlib import Path


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
