"""KV blocks of one model: paging, sharing by reference, and rewind over any number of blocks.

A table is a request's list of block ids in order; block i covers positions [i·block_tokens, (i+1)·block_tokens).
"""

from __future__ import annotations

from specserve.coordinator.refcounts import RefcountPool


class BlockPool(RefcountPool):
    """Blocks of `block_tokens` positions each."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(capacity, "block")
        self.block_tokens = block_tokens

    def needed(self, positions: int) -> int:
        """Blocks that cover this many positions."""
        return -(-positions // self.block_tokens)

    def cover(self, table: list[int], positions: int) -> bool:
        """Grow a table until it covers `positions`. False, and nothing changed, when too few blocks are free."""
        missing = self.needed(positions) - len(table)
        if missing <= 0:
            return True
        if missing > self.free_count:
            return False
        table.extend(self.alloc(missing))
        return True

    def rewind(self, table: list[int], positions: int) -> list[int]:
        """Shrink a table to what `positions` need; returns the blocks that became free, tail first.

        A block that others share only loses this table's reference. `rewind.rewind_kv_cache` does the same to many
        tables that are arrays.
        """
        keep = self.needed(positions)
        surplus = table[keep:][::-1]
        del table[keep:]
        return self.free(surplus) if surplus else []

    def fork(self, table: list[int], positions: int) -> list[int]:
        """A second table over the same full blocks of the first `positions`; a last partial block is not shared."""
        shared = table[: positions // self.block_tokens]
        self.retain(shared)
        return list(shared)

    def clear(self, table: list[int]) -> None:
        """Give back every block of a table."""
        self.rewind(table, 0)
