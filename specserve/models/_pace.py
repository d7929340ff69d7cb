"""Steps that take as long as a device would."""

from __future__ import annotations

import logging
from time import perf_counter, sleep, thread_time

from specserve.errors import EmulationTooSlow
from specserve.models._device_profile import Device

log = logging.getLogger(__name__)

_SPIN_S = 1.5e-4  # a sleep ends up to this much late


class Pace:
    """Holds back steps until a device would have finished them.

    late counts the steps whose results were ready only after that. strict refuses the step where it was the step's own
    computing that took longer, by its thread's CPU time: what a busy neighbour takes is late, but no fault of ours.
    """

    def __init__(self, device: Device, *, strict: bool) -> None:
        self._device = device
        self._strict = strict
        self.steps = 0
        self.late = 0

    def begin(self) -> tuple[float, float]:
        """The start of a step, to be handed to `end`."""
        return perf_counter(), thread_time()

    def end(self, began: tuple[float, float], rows: int, positions: int) -> None:
        """Wait until the step's time is over. Raises EmulationTooSlow."""
        wanted = self._device.step_s(rows, positions)
        own, deadline = thread_time() - began[1], began[0] + wanted
        self.steps += 1
        if perf_counter() > deadline:
            self._note(own, wanted)
        wait_until(deadline)

    def _note(self, own: float, wanted: float) -> None:
        self.late += 1
        told = f"computed for {own * 1000:.2f} ms of CPU time; the emulated device takes {wanted * 1000:.2f} ms"
        if self._strict and own > wanted:
            raise EmulationTooSlow(f"a step {told}; use a slower profile or smaller batches, or set strict: false")
        if self.late & (self.late - 1) == 0:
            log.warning("%d of %d emulated steps were late; the last one %s", self.late, self.steps, told)


def wait_until(deadline: float) -> None:
    """Sleep until `perf_counter` reaches the deadline; the end of the wait, at most 0.15 ms, is spun."""
    while (left := deadline - perf_counter()) > _SPIN_S:
        sleep(left - _SPIN_S)
    while perf_counter() < deadline:
        pass
