"""Work that everything else on the machine comes before: what a process does until it can serve."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

NICENESS: Final = 5
"""A quarter of a core beside one thread that computes: a start comes to its end on a full machine, too.

At 10 a draft worker was back in 34 s instead of 20 beside 200 streams on two cores.
"""

T = TypeVar("T")


def giving_way(work: Callable[[], T]) -> T:
    """Run in a thread of its own behind what others compute, and wait; raises what it raises.

    A process that is started again takes a core for seconds, and streams go on beside it meanwhile. On Linux each
    thread has a niceness of its own, and anybody may step back but few may step forward again: so the thread ends with
    the work. Threads that the work makes step back as well.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="specserve-start", initializer=_step_back) as pool:
        return pool.submit(work).result()


def _step_back() -> None:
    if sys.platform == "linux":  # elsewhere this would be said of the whole process
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
