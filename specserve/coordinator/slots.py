"""Draft slots: places in the draft worker's workspace, one per drafted node whose dist may still be read.

The pool is bookkeeping only; the tensors live in the draft worker. A node in a trie holds one reference for its
place, one for each live child, and one for each batch in flight that names it. Slots leased to a plan that has not
been answered are held by that plan (`drafts.DraftRow`), so that losing the worker gives them back.
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
