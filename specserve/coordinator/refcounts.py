"""A pool of numbered places with reference counts: the base of draft slots and of KV blocks.

Ids are handed out last-freed-first. Every change is all or nothing: a call that cannot be done raises PoolError and
leaves the pool as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from specserve.errors import PoolError


class RefcountPool:
    """Ids 0 … capacity − 1; an id is free (count 0) or held (count ≥ 1), never both and never neither."""

    def __init__(self, capacity: int, what: str) -> None:
        if capacity < 0:
            raise PoolError(f"a pool of {capacity} {what}s cannot exist")
        self._what = what
        self._counts = [0] * capacity
        self._free = list(range(capacity))

    @property
    def capacity(self) -> int:
        """All ids."""
        return len(self._counts)

    @property
    def free_count(self) -> int:
        """Ids that nobody holds."""
        return len(self._free)

    @property
    def held_count(self) -> int:
        """Ids that somebody holds."""
        return len(self._counts) - len(self._free)

    def count(self, place: int) -> int:
        """How many references hold this id; 0 when it is free."""
        return self._counts[place] if 0 <= place < len(self._counts) else 0

    def alloc(self, n: int, counts: Sequence[int] | None = None) -> list[int]:
        """Take n ids, each with one reference or with those in `counts`.

        Raises PoolError when fewer than n are free, when a count is below 1, or when lengths differ.
        """
        if n < 0:
            raise PoolError(f"cannot allocate {n} {self._what}s")
        if n > len(self._free):
            raise PoolError(f"{n} {self._what}s wanted, {len(self._free)} of {self.capacity} free")
        if counts is not None and (len(counts) != n or any(count < 1 for count in counts)):
            raise PoolError(f"{n} {self._what}s need {n} reference counts of at least 1, got {list(counts)}")
        taken = [self._free.pop() for _ in range(n)]
        for index, place in enumerate(taken):
            self._counts[place] = 1 if counts is None else counts[index]
        return taken

    def retain(self, places: Iterable[int]) -> None:
        """Add one reference to each id, once per mention. Raises PoolError if one is not held."""
        listed = list(places)
        for place in listed:
            if self.count(place) == 0:
                raise PoolError(f"{self._what} {place} is not held and cannot be retained")
        for place in listed:
            self._counts[place] += 1

    def free(self, places: Iterable[int]) -> list[int]:
        """Drop one reference per mention; ids whose count reaches 0 return to the pool and are returned, in order.

        Raises PoolError if an id would be freed more often than it is held.
        """
        listed = list(places)
        distinct = set(listed)
        for place, times in Counter(listed).items() if len(distinct) < len(listed) else ((id_, 1) for id_ in distinct):
            if self.count(place) < times:
                raise PoolError(f"{self._what} {place} freed {times}×, but it is held {self.count(place)}×")
        released = []
        for place in listed:
            self._counts[place] -= 1
            if self._counts[place] == 0:
                self._free.append(place)
                released.append(place)
        return released

    def check(self) -> None:
        """Prove that every id is free or held, never both, never neither. Raises PoolError."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise PoolError(f"a {self._what} stands twice in the free list")
        for place, count in enumerate(self._counts):
            if count < 0 or (count == 0) != (place in free):
                raise PoolError(f"{self._what} {place} has count {count} and is {'' if place in free else 'not '}free")
