"""Faults of real processes, from outside: nothing in the product takes part in them. Linux.

kill    SIGKILL
stop    SIGSTOP: a hang, as others see it, until somebody ends the process, or `go_on`
slow    stopped for four fifths of the time
starve  nothing more can be allocated: the limit of the address space is what is used now, so that real calls fail
cut     every connection of the data plane to and from the process is shut down, and the sockets that it and its peers
        listen on cannot be found: it lives, computes and answers Ray's calls, and no message gets through
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from specserve.cluster import processes
from specserve.errors import ConfigError

_PIDFD_GETFD: Final = 438  # the number of the system call on every architecture
_SLOW_PERIOD_S: Final = 0.05
_SLOW_SHARE: Final = 0.8
_CUT_PERIOD_S: Final = 0.02
_HIDDEN: Final = ".cut"


def kill(pid: int, seconds: float) -> None:
    """End the process without a word."""
    del seconds
    _signal(pid, signal.SIGKILL)


def stop(pid: int, seconds: float) -> None:
    """Stop the process, which is to be replaced by another one. It stays as it is until `go_on`."""
    del seconds
    _signal(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    """Let a stopped process go on, if nobody ended it."""
    _signal(pid, signal.SIGCONT)


def slow(pid: int, seconds: float) -> None:
    """Let the process run for a fifth of the time."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and alive(pid):
        _signal(pid, signal.SIGSTOP)
        time.sleep(_SLOW_SHARE * _SLOW_PERIOD_S)
        _signal(pid, signal.SIGCONT)
        time.sleep((1 - _SLOW_SHARE) * _SLOW_PERIOD_S)


def starve(pid: int, seconds: float) -> None:
    """Let every allocation fail that would take new memory from the system. Raises ConfigError if not allowed to."""
    with contextlib.suppress(OSError, ProcessLookupError):  # the process is gone
        used = 1024 * int(status_of(pid, "VmSize"))
        try:
            before = resource.prlimit(pid, resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
        except (PermissionError, ValueError):
            raise ConfigError("limits of other processes cannot be set here; leave the fault `starve` out") from None
        try:
            _while_alive(pid, seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, before)


def _while_alive(pid: int, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and alive(pid):
        time.sleep(_SLOW_PERIOD_S)


def status_of(pid: int, name: str) -> str:
    """A number that the system tells of a process, e.g. VmSize or VmRSS in KiB. Raises OSError when it is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    raise ProcessLookupError(f"no {name} of process {pid}")


def cut(pid: int, seconds: float) -> None:
    """Let no message of the data plane reach the process or leave it. Raises ConfigError where that is not allowed."""
    end_s = time.monotonic() + seconds
    hidden: set[str] = set()
    try:
        while time.monotonic() < end_s and alive(pid):
            hidden |= _break_connections(pid)
            time.sleep(_CUT_PERIOD_S)
    finally:
        for path in hidden:
            with contextlib.suppress(OSError):  # the process is gone, and its folder with it
                os.rename(path + _HIDDEN, path)


KINDS: Final[dict[str, Callable[[int, float], None]]] = {
    "kill": kill,
    "stop": stop,
    "slow": slow,
    "cut": cut,
    "starve": starve,
}
"""What can be done to a process, for so many seconds where it does not last by itself."""


def alive(pid: int) -> bool:
    """Whether a process of this number runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def titled(word: str) -> list[int]:
    """Processes below this one with the word in their title."""
    found = []
    for process in processes.descendants():
        with contextlib.suppress(OSError):
            if word in Path(f"/proc/{process.pid}/cmdline").read_text():
                found.append(process.pid)
    return sorted(found)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _break_connections(pid: int) -> set[str]:
    """Hide what this process and its peers listen on, then shut down what is connected; the paths that were hidden."""
    hidden = set()
    for each in _data_sockets(pid):
        for path in _channel_paths(each):
            with contextlib.suppress(FileNotFoundError):  # it is hidden already
                os.rename(path, path + _HIDDEN)
                hidden.add(path)
        with contextlib.suppress(OSError):  # it only listens
            if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                each.shutdown(socket.SHUT_RDWR)
    return hidden


def _data_sockets(pid: int) -> Iterator[socket.socket]:
    """Our own handles on the sockets of a process that belong to `transport.socket`, each closed after its turn."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for number in _socket_numbers(pid):
            handle = _handle(process, number)
            if handle is not None:
                with handle:
                    if _channel_paths(handle):
                        yield handle
    finally:
        os.close(process)


def _socket_numbers(pid: int) -> list[int]:
    numbers = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry).startswith("socket:"):
                    numbers.append(int(entry.name))
    return numbers


def _handle(process: int, number: int) -> socket.socket | None:
    library = ctypes.CDLL(None, use_errno=True)
    handle = library.syscall(_PIDFD_GETFD, process, number, 0)
    if handle >= 0:
        return socket.socket(fileno=handle)
    if ctypes.get_errno() == errno.EPERM:
        raise ConfigError("cutting connections needs the right to trace processes (root); leave the fault `cut` out")
    return None  # closed meanwhile


def _channel_paths(handle: socket.socket) -> list[str]:
    """The paths of `transport.socket` that a socket is bound or connected to; none for any other socket."""
    found = []
    for name in (handle.getsockname, handle.getpeername):
        with contextlib.suppress(OSError):  # not connected
            path = name() if handle.family == socket.AF_UNIX else ""
            if isinstance(path, str) and "/specserve-" in path and path.endswith("/in"):
                found.append(path)
    return found
