"""A pool of numbered places with reference counts: the base of draft slots and of KV blocks.

Ids are handed out last-freed-first. Every change is all or nothing: a call that cannot be done raises PoolError and
leaves the pool as it was. Counts are an array: what a whole round takes or gives back goes in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from specserve.errors import PoolError

Ids = npt.NDArray[np.int64]

_ONE = np.int64(1)


class RefcountPool:
    """Ids 0 … capacity − 1; an id is free (count 0) or held (count ≥ 1), never both and never neither."""

    def __init__(self, capacity: int, what: str) -> None:
        if capacity < 0:
            raise PoolError(f"a pool of {capacity} {what}s cannot exist")
        self._what = what
        self._counts = np.zeros(capacity, dtype=np.int64)
        self._stack = np.arange(capacity, dtype=np.int64)  # the first free_count of it are free, the next one last
        self._last_mention = np.zeros(capacity, dtype=np.int64)
        self.capacity = capacity
        self.free_count = capacity

    @property
    def held_count(self) -> int:
        """Ids that somebody holds."""
        return self.capacity - self.free_count

    def count(self, place: int) -> int:
        """How many references hold this id; 0 when it is free."""
        return int(self._counts[place]) if 0 <= place < self.capacity else 0

    def lease(self, n: int) -> Ids:
        """Take n ids, int64 [n], each with one reference. Raises PoolError when fewer than n are free."""
        if n < 0:
            raise PoolError(f"cannot allocate {n} {self._what}s")
        if n > self.free_count:
            raise PoolError(f"{n} {self._what}s wanted, {self.free_count} of {self.capacity} free")
        end = self.free_count
        self.free_count = end - n
        taken = self._stack[self.free_count : end][::-1].copy()
        self._counts[taken] = 1
        return taken

    def alloc(self, n: int, counts: Sequence[int] | None = None) -> list[int]:
        """Take n ids, each with one reference or with those in `counts`.

        Raises PoolError when fewer than n are free, when a count is below 1, or when lengths differ.
        """
        if counts is not None and (len(counts) != n or any(count < 1 for count in counts)):
            raise PoolError(f"{n} {self._what}s need {n} reference counts of at least 1, got {list(counts)}")
        taken = self.lease(n)
        if counts is not None:
            self._counts[taken] = counts
        listed: list[int] = taken.tolist()
        return listed

    def retain(self, places: Iterable[int] | Ids) -> None:
        """Add one reference to each id, once per mention. Raises PoolError if one is not held."""
        listed = self._listed(places)
        counts = self._counts.take(listed)
        if not counts.all():
            place = int(listed[counts == 0][0])
            raise PoolError(f"{self._what} {place} is not held and cannot be retained")
        np.add.at(self._counts, listed, _ONE)

    def free(self, places: Iterable[int] | Ids) -> list[int]:
        """Drop one reference per mention; ids whose count reaches 0 return to the pool and are returned, in order.

        Raises PoolError if an id would be freed more often than it is held.
        """
        listed = self._listed(places)
        if not len(listed):
            return []
        np.subtract.at(self._counts, listed, _ONE)
        left = self._counts.take(listed)
        if left.min() < 0:
            np.add.at(self._counts, listed, _ONE)
            place = int(listed[left < 0][0])
            times = int((listed == place).sum())
            raise PoolError(f"{self._what} {place} freed {times}×, but it is held {self.count(place)}×")
        released: list[int] = self._distinct(listed[left == 0]).tolist()
        end = self.free_count + len(released)
        self._stack[self.free_count : end] = released
        self.free_count = end
        return released

    def _listed(self, places: Iterable[int] | Ids) -> Ids:
        """The ids as an array. Raises PoolError for one that the pool does not have."""
        listed = places if isinstance(places, np.ndarray) else np.array(list(places), dtype=np.int64)
        if len(listed) and not 0 <= listed.min() <= listed.max() < self.capacity:
            raise PoolError(f"{self._what}s {listed.tolist()} freed or retained, and there are only {self.capacity}")
        return listed

    def _distinct(self, places: Ids) -> Ids:
        """Each id once, where it was mentioned last."""
        order = np.arange(len(places))
        self._last_mention[places] = order
        distinct: Ids = places[self._last_mention[places] == order]
        return distinct

    def check(self) -> None:
        """Prove that every id is free or held, never both, never neither. Raises PoolError."""
        free = np.bincount(self._stack[: self.free_count], minlength=self.capacity)
        wrong = np.flatnonzero((self._counts < 0) | (free != (self._counts == 0)))
        for place in wrong.tolist():
            raise PoolError(f"{self._what} {place} has count {self._counts[place]} and is free {free[place]}×")
