"""A pool of KV blocks in which full committed blocks outlive their holders, until their room is needed.

A block is free, held or cached (invariant I3). Once it is full of committed tokens it gets a name (`block_keys`); when
its last holder lets it go it is cached, and whoever begins with the same tokens holds it again instead of feeding them.
Cached blocks count as room: where free ones do not suffice they are evicted, the one that was let go longest ago first.

A parent is never evicted before its child. It takes no bookkeeping, because of two rules: who holds a named block also
holds all those before it, in the same table, and tables are let go from their tails. The first one is why `remember`
exchanges a block for the one that has its name already.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from specserve.config import EngineConfig
from specserve.coordinator.block_keys import BlockKeys
from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.refcounts import Ids
from specserve.errors import PoolError
from specserve.types import CacheStats, WorkerInfo


class PrefixCache(BlockPool):
    """A `BlockPool` that caches. What it counts is taken with `take_stats`."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(capacity, block_tokens)
        self._names: dict[int, bytes] = {}  # of held and cached blocks
        self._found: dict[bytes, int] = {}  # the same the other way round
        self._cached: OrderedDict[int, None] = OrderedDict()  # let go longest ago first
        self._stats = CacheStats()

    @property
    def free_count(self) -> int:
        """Blocks that can be had: free ones, and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached_count(self) -> int:
        """Blocks that nobody holds, with KV that may be wanted again."""
        return len(self._cached)

    def take_stats(self) -> CacheStats:
        """What was counted since the last call."""
        stats, self._stats = self._stats, CacheStats()
        return stats

    # ---- for requests ---------------------------------------------------------------------------------------

    def reuse(self, table: array[int], keys: BlockKeys) -> int:
        """Fill an empty table with the blocks that are known of a request's beginning; returns their positions.

        The newest token is never among them: something has to be fed to look behind it.
        """
        known = self._known(keys)
        for block in known:
            self._hold(block)
        table.extend(known)
        self._stats.queries += keys.length
        self._stats.hits += len(known) * self.block_tokens
        return len(known) * self.block_tokens

    def held_prefix(self, keys: BlockKeys) -> int:
        """Blocks that `reuse` would find and that are held by others: they take no room."""
        return sum(block not in self._cached for block in self._known(keys))

    def _known(self, keys: BlockKeys) -> list[int]:
        known: list[int] = []
        for key in keys.between(0, (keys.length - 1) // self.block_tokens, self.block_tokens):
            block = self._found.get(key)
            if block is None:
                break
            known.append(block)
        return known

    def remember(self, table: array[int], keys: BlockKeys, covered: int) -> None:
        """Name the full blocks of a table that covers so many positions, as far as these are committed.

        The block of the newest token stays without a name, full or not: its last position may be fed again. Where
        another block has the name, the table holds that one from now on. What is in flight may still read or write the
        one given up: workers do what they are told in order, so whoever gets it next writes later.
        """
        first = full = min(covered, keys.length - 1) // self.block_tokens
        while first > 0 and table[first - 1] not in self._names:
            first -= 1
        if first == full:
            return
        for place, key in enumerate(keys.between(first, full, self.block_tokens), first):
            known = self._found.get(key)
            if known is None:
                self._found[key], self._names[table[place]] = table[place], key
            else:
                self._hold(known)
                self.free([table[place]])
                table[place] = known

    def void(self) -> None:
        """Forget all names: what the blocks hold is gone, or not to be trusted. Holders keep theirs."""
        self._names.clear()
        self._found.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def resize(self, capacity: int) -> None:
        """See `RefcountPool`; what is cached is forgotten."""
        self.void()
        super().resize(capacity)

    # ---- bookkeeping ----------------------------------------------------------------------------------------

    def _hold(self, block: int) -> None:
        self._cached.pop(block, None)
        self._counts[block] += 1

    def _check_room(self, n: int) -> None:
        if len(self._free) < n <= self.free_count:
            self._evict(n - len(self._free))
        super()._check_room(n)

    def _evict(self, n: int) -> None:
        for _ in range(n):
            block, _ = self._cached.popitem(last=False)
            del self._found[self._names.pop(block)]
            self._free.append(block)
        self._stats.evictions += n

    def _put_back(self, places: Sequence[int]) -> None:
        names = self._names
        super()._put_back([block for block in places if block not in names])
        for block in places:
            if block in names:
                self._cached[block] = None

    def _resting(self) -> Ids:
        return np.concatenate([super()._resting(), np.fromiter(self._cached, np.int64, len(self._cached))])

    def check(self) -> None:
        """Prove that every block is free, held or cached, never two of these, and every name the name of one block.

        Raises PoolError.
        """
        super().check()
        if {block: key for key, block in self._found.items()} != self._names:
            raise PoolError(f"{len(self._names)} blocks have names, and {len(self._found)} names are known")
        for block in self._free:
            if block in self._names:
                raise PoolError(f"block {block} is free and has a name")
        for block in self._cached:
            if block not in self._names:
                raise PoolError(f"block {block} is cached and has no name")


def pool_of(config: EngineConfig, info: WorkerInfo) -> BlockPool:
    """The pool for a worker's blocks: one that caches, unless it must not, or nobody could go on from a block."""
    kind = PrefixCache if config.prefix_cache and info.positional and not info.reads_hidden else BlockPool
    return kind(info.blocks, info.block_tokens)
