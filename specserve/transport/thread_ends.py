"""The end of a thread of another process on this node, as something that a selector can wait for. Linux 6.9 and later.

Of a process that is killed each thread ends when it next has a core, but its connections break only when all of its
memory is given back: a fifth of a second for 800 MiB, and longer where the cores are full or the process had a GPU.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from typing import Final

_OF_A_THREAD: Final = os.O_EXCL
"""PIDFD_THREAD. Not for a process's first thread, which counts as there until the last one ends."""

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: process, user and group


class ThreadEnd:
    """A handle that becomes readable when the thread ends."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def fileno(self) -> int:
        """For selectors."""
        return self._handle

    def close(self) -> None:
        """Release the handle, once."""
        os.close(self._handle)


def end_of(thread: int, stream: socket.socket) -> ThreadEnd | None:
    """A handle on the thread of this number, if it belongs to the process that listened for this stream of the node.

    None where the system cannot say, and where that process is in another container, which counts threads anew.
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, _, _ = _CREDENTIALS.unpack(credentials)
        handle = ThreadEnd(os.pidfd_open(thread, _OF_A_THREAD))
        if os.path.exists(f"/proc/{process}/task/{thread}"):
            return handle
        handle.close()
    return None
