"""The processes that hold one model together: how they meet, sum, and tell each other what failed.

Rank 0 alone is talked to; it tells the others what to compute. They sum over NCCL on GPUs and over gloo on CPUs. A rank
that fails in a step *sits it out*: it adds zeros to what is left of the step, so that nobody waits for it, and then
says so. What breaks between the ranks (one is gone, or took too long) cannot be repaired from inside: all of them are
then of no use, `RankGroup.broken` says why, and new processes have to meet.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from specserve.errors import GroupLost

_FOR_EVER = timedelta(days=365)  # a rank may wait that long for something to do
_REPORT_BYTES = 512
_SIOCGIFADDR = 0x8915

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where rank 0 waits for the others of one group."""

    host: str
    port: int


class MeetingPlace:
    """Rank 0's side of a meeting. It listens on `host` only, not on every interface as torch's store does by itself."""

    def __init__(self, host: str, timeout_s: float) -> None:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.meeting = Meeting(host, listener.getsockname()[1])
        self.store = TCPStore(
            host,
            self.meeting.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def arrive(meeting: Meeting, timeout_s: float) -> Store:
    """Another rank's side of a meeting. Raises GroupLost where nobody waits."""
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise GroupLost(f"no rank 0 waits at {meeting.host} port {meeting.port}: {str(error)[:300]}") from None


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One exchange of a step, as the first forward showed it. width is that of the rows that are exchanged."""

    width: int
    dtype: torch.dtype
    to_lead: bool


class RankGroup:
    """This process's place in one group, for as long as it lives: torch keeps one per process.

    host is this rank's address, over whose interface it talks on CPUs. A sum that takes longer than hang_after_s
    breaks the group. Raises GroupLost when the ranks do not meet.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, host: str, device: torch.device, hang_after_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.broken: str | None = None
        self._known: list[_Exchange] = []
        self._learning = True
        self._done = 0
        self._use_interface_of(host)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._exchange(
            lambda: dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_FOR_EVER)
        )
        patience = timedelta(seconds=hang_after_s)
        self._step = self._exchange(lambda: dist.new_group(backend=backend, timeout=patience))

    @staticmethod
    def _use_interface_of(host: str) -> None:
        """Left alone, gloo takes the interface that the machine's own name leads to, which others may not reach."""
        name = _interface_of(host)
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)

    def _exchange(self, what: Callable[[], T]) -> T:
        if self.broken is not None:
            raise GroupLost(self.broken)
        try:
            return what()
        except RuntimeError as error:
            self.broken = f"rank {self.rank} of {self.size} lost the others: {str(error).strip()[:300]}"
            raise GroupLost(self.broken) from error

    # ---- what the model's layers do in a step -------------------------------------------------------------------

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' rows [..., T, width], in place."""
        self._note(rows, to_lead=False)
        self._exchange(lambda: dist.all_reduce(rows, group=self._present_group))
        return rows

    def collect(self, rows: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's rows [..., m, width], by rank, at rank 0; None at the others."""
        parts = [torch.empty_like(rows) for _ in range(self.size)] if self.rank == 0 else None
        self._note(rows, to_lead=True)  # what does not fit above has not taken part yet
        if rows.numel():  # a batch that only fills pages wants no logits
            self._exchange(lambda: dist.gather(rows.contiguous(), parts, dst=0, group=self._present_group))
        return parts

    @property
    def _present_group(self) -> dist.ProcessGroup | None:
        """In the first forward ranks may wait long for one that reads its weights more slowly."""
        return None if self._learning else self._step

    def _note(self, rows: torch.Tensor, *, to_lead: bool) -> None:
        self._done += 1
        if self._learning:
            self._known.append(_Exchange(rows.shape[-1], rows.dtype, to_lead))

    def learned(self) -> None:
        """The first forward is over: every later one exchanges the same, over its own rows."""
        self._learning = False
        self._done = 0

    # ---- steps --------------------------------------------------------------------------------------------------

    def step(self, forward: Callable[[], torch.Tensor], tokens: int, wanted: int) -> torch.Tensor | Exception:
        """What this rank's part of a step came to; a part that failed is sat out. Raises GroupLost."""
        self._done = 0
        try:
            return forward()
        except GroupLost:
            raise
        except Exception as error:  # whatever one batch provokes here must leave nobody waiting
            failure: Exception = error.with_traceback(None)  # its frames hold the tensors that did not fit
        self._sit_out(tokens, wanted)
        return failure

    def _sit_out(self, tokens: int, wanted: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for exchange in self._known[self._done :]:
            rows = wanted if exchange.to_lead else tokens
            try:
                nothing = torch.zeros(rows, exchange.width, dtype=exchange.dtype, device=self.device)
            except (RuntimeError, MemoryError) as error:
                self.broken = f"rank {self.rank} of {self.size} has no memory left to go on: {error}"
                raise GroupLost(self.broken) from None
            if exchange.to_lead:
                self.collect(nothing)
            else:
                self.sum(nothing)

    def report(self, text: str) -> list[str]:
        """Say how a step went, nothing where it went well: at rank 0 what each rank said, at the others nothing."""
        words = text.encode()[:_REPORT_BYTES]
        mine = torch.zeros(_REPORT_BYTES, dtype=torch.uint8)
        mine[: len(words)] = torch.tensor(list(words), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else None
        self._exchange(lambda: dist.gather(mine, parts, dst=0, group=self._step))
        return [bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in parts or []]

    # ---- what rank 0 tells the others ---------------------------------------------------------------------------

    def tell(self, words: torch.Tensor) -> None:
        """Rank 0's int64 words, which each other rank gets from `told`."""
        self._exchange(lambda: dist.broadcast(words, src=0))

    def told(self, count: int) -> torch.Tensor:
        """The next `count` words of rank 0, waiting for them as long as it takes."""
        words = torch.empty(count, dtype=torch.int64)
        self.tell(words)
        return words

    def smallest(self, value: int) -> int:
        """The smallest of all ranks' values."""
        found = torch.tensor(value, dtype=torch.int64)
        self._exchange(lambda: dist.all_reduce(found, dist.ReduceOp.MIN))
        return int(found)


def _interface_of(host: str) -> str | None:
    """The network interface that has this IPv4 address; None where there is none, or where it is of another kind."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        wanted = socket.inet_aton(host)
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return None


def shares(total: int, size: int) -> Sequence[tuple[int, int]]:
    """Begin and end of each rank's share of `total` rows or columns: as many for each; the last has what is left."""
    each = -(-total // size)
    return [(min(rank * each, total), min((rank + 1) * each, total)) for rank in range(size)]
