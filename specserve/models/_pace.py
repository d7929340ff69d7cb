"""Steps that take as long as a device would."""

from __future__ import annotations

import logging
from time import perf_counter, sleep, thread_time

from specserve.errors import EmulationTooSlow
from specserve.models._device_profile import Device

log = logging.getLogger(__name__)

_SPIN_S = 1.5e-4  # a sleep ends up to this much late


class Pace:
    """The `Hardware` of an emulated device: holds results back until the device would have them.

    The device does one step after the other. A step begins when its batch arrives or, within a batch, with the end of
    the step before; what the host computes until `finish` is inside its time, as it is inside published step times.

    late counts the steps whose results were ready only after that. strict refuses the step where it was the step's own
    computing that took longer, by its thread's CPU time: what a busy neighbour takes is late, but no fault of ours.
    """

    def __init__(self, device: Device, *, strict: bool) -> None:
        self._device = device
        self._strict = strict
        self._free_s = 0.0  # when the device has done all that it was told to
        self._wanted_s = 0.0  # what it takes for that, since the last `finish` or the batch's arrival
        self._computing_s = 0.0  # the thread's CPU time then
        self.steps = 0
        self.late = 0

    def arrived(self) -> None:
        """See `Hardware`."""
        self._rest(perf_counter())

    def _rest(self, free_s: float) -> None:
        self._free_s, self._wanted_s, self._computing_s = free_s, 0.0, thread_time()

    def step(self, rows: int, positions: int) -> None:
        """The device is told to do a step; it does it behind those before."""
        seconds = self._device.step_s(rows, positions)
        self._free_s += seconds
        self._wanted_s += seconds
        self.steps += 1

    def finish(self) -> None:
        """Wait until the device is done. Raises EmulationTooSlow."""
        own, now = thread_time() - self._computing_s, perf_counter()
        if now > self._free_s:
            self._note(own)
        wait_until(self._free_s)
        self._rest(max(now, self._free_s))

    def _note(self, own_s: float) -> None:
        if not self._wanted_s:
            return
        self.late += 1
        wanted = f"the emulated device takes {self._wanted_s * 1000:.2f} ms"
        told = f"computed for {own_s * 1000:.2f} ms of CPU time; {wanted}"
        if self._strict and own_s > self._wanted_s:
            raise EmulationTooSlow(f"a step {told}; use a slower profile or smaller batches, or set strict: false")
        if self.late & (self.late - 1) == 0:
            log.warning("%d of %d emulated steps were late; the last one %s", self.late, self.steps, told)


def wait_until(deadline: float) -> None:
    """Sleep until `perf_counter` reaches the deadline; the end of the wait, at most 0.15 ms, is spun."""
    while (left := deadline - perf_counter()) > _SPIN_S:
        sleep(left - _SPIN_S)
    while perf_counter() < deadline:
        pass
