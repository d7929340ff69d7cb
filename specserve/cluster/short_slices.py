"""Threads that run as soon as they wake, also where every core is busy: whole devices wait for them.

Linux shares cores in slices of a few ms, and a thread that wakes may wait for the end of somebody else's. One that
asks for short slices gets no more of a core than before, but comes next (EEVDF, Stoica and Abdel-Wahab, 1995).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from typing import Final

SLICE_S: Final = 1e-4
"""The shortest that Linux grants."""

_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQII")  # struct sched_attr, in the size that every version of it has
_NUMBERS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Of the system calls sched_setattr and sched_getattr, by machine."""


@contextlib.contextmanager
def short_slices() -> Iterator[None]:
    """Threads that are made within this are prompt for good; the one that makes them is so meanwhile.

    Where the system knows no such slices, nothing happens.
    """
    before = slice_s()
    if before is None or not _set_slice(SLICE_S):
        yield
        return
    try:
        yield
    finally:
        _set_slice(before)


def slice_s() -> float | None:
    """That of the present thread; None where the system does not say, or schedules it in another way."""
    given = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if _call(1, given, _ATTRIBUTES.size, 0) != 0:
        return None
    _, policy, _, _, _, runtime_ns, _, _, _, _ = _ATTRIBUTES.unpack(given.raw)
    return float(runtime_ns) / 1e9 if policy == os.SCHED_OTHER else None


def _set_slice(seconds: float) -> bool:
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    runtime_ns = round(seconds * 1e9)
    packed = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, niceness, 0, runtime_ns, 0, 0, 0, 0)
    return _call(0, packed, 0) == 0


def _call(which: int, attributes: bytes | ctypes.Array[ctypes.c_char], *rest: int) -> int:
    """sched_setattr (0) or sched_getattr (1) of the present thread; −1 where that is not possible."""
    if sys.platform != "linux" or os.uname().machine not in _NUMBERS:
        return -1
    number = _NUMBERS[os.uname().machine][which]
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, *rest))
