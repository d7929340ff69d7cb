"""Steps that take as long as a device would."""

from __future__ import annotations

import logging
from time import perf_counter, sleep, thread_time

from specserve.errors import EmulationTooSlow
from specserve.models import Steps
from specserve.models._device_profile import Device

log = logging.getLogger(__name__)

_SPIN_S = 1.5e-4  # a sleep ends up to this much late


class Pace:
    """The `Hardware` of an emulated device: holds results back until the device would have them.

    The device does one step after the other. A step begins when its batch arrives or, within a batch, with the end of
    the step before; what the host computes until `finish` is inside its time, as it is inside published step times.

    late counts the results that were ready only after that. strict refuses those whose own computing took longer, by
    its thread's CPU time: what a busy neighbour takes is late, but no fault of ours. refused counts them, as does late.
    """

    def __init__(self, device: Device, *, strict: bool) -> None:
        self._device = device
        self._strict = strict
        self._free_s = 0.0  # when the device has done all that it was told to
        self._wanted_s = 0.0  # what it takes for that, since the last `finish` or the batch's arrival
        self._computing_s = 0.0  # the thread's CPU time then
        self.steps = 0
        self.results = 0
        self.late = 0
        self.refused = 0
        self._told: Steps = (0, 0, 0)

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
        own, now, wanted = thread_time() - self._computing_s, perf_counter(), self._wanted_s
        self.results += wanted > 0
        late, free_s = wanted > 0 and now > self._free_s, self._free_s
        wait_until(free_s)
        self._rest(max(now, free_s))
        if late:
            self._note(own, wanted)

    def counted(self) -> Steps:
        """See `Hardware`."""
        before = self._told
        self._told = self.results - self.late, self.late - self.refused, self.refused
        return self._told[0] - before[0], self._told[1] - before[1], self._told[2] - before[2]

    def _note(self, own_s: float, wanted_s: float) -> None:
        self.late += 1
        told = f"computed for {own_s * 1000:.2f} ms of CPU time; the emulated device takes {wanted_s * 1000:.2f} ms"
        if self.late & (self.late - 1) == 0:
            log.warning("%d of %d emulated results were late; the last one %s", self.late, self.results, told)
        if self._strict and own_s > wanted_s:
            self.refused += 1
            raise EmulationTooSlow(f"a step {told}; use a slower profile or smaller batches, or set strict: false")


def wait_until(deadline: float) -> None:
    """Sleep until `perf_counter` reaches the deadline; the end of the wait, at most 0.15 ms, is spun."""
    while (left := deadline - perf_counter()) > _SPIN_S:
        sleep(left - _SPIN_S)
    while perf_counter() < deadline:
        pass
