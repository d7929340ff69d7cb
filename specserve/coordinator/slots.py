"""Draft slots: places in the draft worker's workspace, one per drafted token whose dist may still be read.

The pool is bookkeeping only; the tensors live in the draft worker. A chain holds one reference to each of its slots,
and so does each batch in flight that names it. Slots leased to a plan that has not been answered are held by that
plan, so that losing the worker gives them back.
"""

from __future__ import annotations

from specserve.coordinator.refcounts import RefcountPool


class SlotPool(RefcountPool):
    """Slots of one draft worker."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, "slot")

    def take(self, wanted: int) -> list[int]:
        """Up to `wanted` slots: exhaustion is back-pressure, so a short pool gives a shorter draft, not an error."""
        return self.alloc(min(wanted, self.free_count))
