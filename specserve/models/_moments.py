"""When a device had done what it was told so far, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch


class Moment(Protocol):
    """A point in a device's work."""

    def until(self, later: Moment) -> float:
        """Seconds to a later moment of the same device, which has passed, or is waited for."""
        ...


def now(device: torch.device) -> Moment:
    """The moment in which the device has done all that it was told up to here."""
    return _OfStream(device) if device.type == "cuda" else _OfHost(perf_counter())


@dataclass(frozen=True, slots=True)
class _OfHost:
    """What computes at once has done all."""

    at: float

    def until(self, later: Moment) -> float:
        assert isinstance(later, _OfHost), "moments of one device"
        return later.at - self.at


class _OfStream:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def until(self, later: Moment) -> float:
        assert isinstance(later, _OfStream), "moments of one device"
        later._event.synchronize()
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1000
