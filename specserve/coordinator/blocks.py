"""KV blocks of one model: paging, sharing by reference, and rewind over any number of blocks.

A table is a request's block ids in order; block i covers positions [i·block_tokens, (i+1)·block_tokens). Tables are
arrays of machine integers, so that a message takes the tables of all rows in as many copies, not number by number.
"""

from __future__ import annotations

from array import array

from specserve.coordinator.block_keys import BlockKeys
from specserve.coordinator.refcounts import RefcountPool
from specserve.types import CacheStats


def empty_table() -> array[int]:
    """A table without blocks."""
    return array("i")


class BlockPool(RefcountPool):
    """Blocks of `block_tokens` positions each. This one forgets what nobody holds; `PrefixCache` does not."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(capacity, "block")
        self.block_tokens = block_tokens

    def needed(self, positions: int) -> int:
        """Blocks that cover this many positions."""
        return -(-positions // self.block_tokens)

    def cover(self, table: array[int], positions: int) -> bool:
        """Grow a table until it covers `positions`. False, and nothing changed, when too few blocks are free."""
        missing = -(-positions // self.block_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > self.free_count:
            return False
        table.extend(self.alloc(missing))
        return True

    def trim(self, table: array[int], positions: int) -> list[int]:
        """Shrink a table to what `positions` need; returns the blocks that it no longer names, tail first.

        Their references are the caller's to give back, for many tables in one go.
        """
        keep = -(-positions // self.block_tokens)
        if keep >= len(table):
            return []
        surplus = list(table[keep:])
        surplus.reverse()
        del table[keep:]
        return surplus

    def rewind(self, table: array[int], positions: int) -> list[int]:
        """Shrink a table to what `positions` need; returns the blocks that became free, tail first.

        A block that others share only loses this table's reference. `rewind.rewind_kv_cache` does the same to many
        tables that are arrays.
        """
        return self.free(self.trim(table, positions))

    def fork(self, table: array[int], positions: int) -> array[int]:
        """A second table over the same full blocks of the first `positions`; a last partial block is not shared."""
        shared = table[: positions // self.block_tokens]
        self.retain(shared)
        return shared

    def clear(self, table: array[int]) -> None:
        """Give back every block of a table."""
        self.rewind(table, 0)

    # ---- what a pool that caches does -----------------------------------------------------------------------

    @property
    def cached_count(self) -> int:
        """See `PrefixCache`."""
        return 0

    def reuse(self, table: array[int], keys: BlockKeys) -> int:
        """See `PrefixCache`: nothing is known of anybody's beginning."""
        del table, keys
        return 0

    def held_prefix(self, keys: BlockKeys) -> int:
        """See `PrefixCache`."""
        del keys
        return 0

    def remember(self, table: array[int], keys: BlockKeys, covered: int) -> None:
        """See `PrefixCache`."""

    def void(self) -> None:
        """See `PrefixCache`."""

    def take_stats(self) -> CacheStats:
        """See `PrefixCache`."""
        return CacheStats()
