"""Large memory pages for what every step reads from end to end, where the system gives them to who asks.

With ordinary pages of 4 KiB a core looks up a page's place for every 4 KiB of weights, and in a virtual machine each
look-up is itself a walk through two tables: reading weights then takes more than twice as long.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

_CHUNK = 1 << 26  # bytes; what is not used of it is never touched, and so takes no memory


def prefer(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for large pages behind a tensor on a CPU that was not written to yet. Returns it, whatever the answer."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and tensor.device.type == "cpu":
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = tensor.data_ptr() + tensor.nbytes - begin
        if size > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
    return tensor


class Arena:
    """Many tensors of floats in few large pieces of memory. A piece is given back with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0)

    def floats(self, count: int) -> torch.Tensor:
        """float32 [count], not initialised, at an address that is a multiple of 64 bytes."""
        rounded = -(-count // 16) * 16
        if rounded > len(self._chunk):
            self._chunk = prefer(torch.empty(max(rounded, _CHUNK // 4)))
        taken, self._chunk = self._chunk[:count], self._chunk[rounded:]
        return taken
