"""A pool of numbered places with reference counts: the base of draft slots and of KV blocks.

Ids are handed out last-freed-first. Every change is all or nothing: a call that cannot be done raises PoolError and
leaves the pool as it was. A few ids go one by one, many as an array: as arrays the few cost four times more, and the
many a fraction. Both see the same memory. `lease` gives an array, and `give_back` takes one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from specserve.errors import PoolError

Ids = npt.NDArray[np.int64]

_MANY = 64
"""From so many ids on they are counted as an array."""


class RefcountPool:
    """Ids 0 … capacity − 1; an id is free (count 0) or held (count ≥ 1), never both and never neither."""

    def __init__(self, capacity: int, what: str) -> None:
        if capacity < 0:
            raise PoolError(f"a pool of {capacity} {what}s cannot exist")
        self._what = what
        self._make(capacity)

    def _make(self, capacity: int) -> None:
        self._counts = array("q", bytes(8 * capacity))
        self._count_array = np.frombuffer(self._counts, dtype=np.int64)
        self._free = array("q", range(capacity))
        self._marks = np.empty(capacity, dtype=np.int64)  # only to see whether ids differ

    def resize(self, capacity: int) -> None:
        """From now on there are so many ids. Raises PoolError while any is held."""
        if self.held_count:
            raise PoolError(f"{self.held_count} {self._what}s are held and cannot become others")
        if capacity != self.capacity:
            self._make(capacity)

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
        return self.capacity - self.free_count

    def count(self, place: int) -> int:
        """How many references hold this id; 0 when it is free."""
        return self._counts[place] if 0 <= place < len(self._counts) else 0

    def alloc(self, n: int, counts: Sequence[int] | None = None) -> list[int]:
        """Take n ids, each with one reference or with those in `counts`.

        Raises PoolError when fewer than n are free, when a count is below 1, or when lengths differ.
        """
        self._check_room(n)
        if counts is not None and (len(counts) != n or any(count < 1 for count in counts)):
            raise PoolError(f"{n} {self._what}s need {n} reference counts of at least 1, got {list(counts)}")
        keep = len(self._free) - n
        taken = self._free[keep:].tolist()
        taken.reverse()
        del self._free[keep:]
        for place, count in zip(taken, repeat(1) if counts is None else counts, strict=False):
            self._counts[place] = count
        return taken

    def lease(self, n: int) -> Ids:
        """`alloc` for many: int64 [n], each with one reference. Raises PoolError when fewer than n are free."""
        self._check_room(n)
        keep = len(self._free) - n
        taken = np.array(self._free[keep:])[::-1]
        del self._free[keep:]
        self._count_array[taken] = 1
        return taken

    def _check_room(self, n: int) -> None:
        if n < 0:
            raise PoolError(f"cannot allocate {n} {self._what}s")
        if n > len(self._free):
            raise PoolError(f"{n} {self._what}s wanted, {len(self._free)} of {self.capacity} free")

    def retain(self, places: Iterable[int]) -> None:
        """Add one reference to each id, once per mention. Raises PoolError if one is not held."""
        listed, counts = list(places), self._counts
        many = self._many_held(listed)
        if many is not None:
            self._count_array[many] += 1
            return
        for place in listed:
            if not 0 <= place < len(counts) or not counts[place]:
                raise PoolError(f"{self._what} {place} is not held and cannot be retained")
        for place in listed:
            counts[place] += 1

    def hold(self, places: Ids) -> None:
        """`retain` for distinct ids in an array, int64 [n]. Raises PoolError if one is not held, or named twice."""
        if len(places) < _MANY:
            self.retain(self._listed(places))
            return
        self._check_given(places)
        self._count_array[places] += 1

    def free(self, places: Iterable[int]) -> list[int]:
        """Drop one reference per mention; ids whose count reaches 0 return to the pool and are returned, in order.

        Raises PoolError if an id would be freed more often than it is held.
        """
        listed = list(places)
        many = self._many_held(listed)
        if many is not None:
            released: list[int] = self._drop(many).tolist()
            self._put_back(released)
            return released
        counts, released = self._counts, list[int]()
        for done, place in enumerate(listed):
            left = counts[place] - 1 if 0 <= place < len(counts) else -1
            if left < 0:
                self._take_back(listed[:done])
                raise PoolError(f"{self._what} {place} freed {listed.count(place)}×, held {self.count(place)}×")
            counts[place] = left
            if not left:
                released.append(place)
        self._put_back(released)
        return released

    def _many_held(self, listed: Sequence[int]) -> Ids | None:
        """These as an array, if they are many, all held and none named twice; what is amiss is found one by one."""
        if len(listed) < _MANY:
            return None
        ids = np.array(listed, dtype=np.int64)
        return ids if self._held_and_distinct(ids) else None

    def _drop(self, ids: Ids) -> Ids:
        """Drop one reference to each of these distinct ids, which are held; returns those that nobody holds now."""
        left = self._count_array[ids] - 1
        self._count_array[ids] = left
        released: Ids = ids[left == 0]
        return released

    def _put_back(self, places: Sequence[int]) -> None:
        """Nobody holds these any more."""
        self._free.extend(places)

    def _take_back(self, places: Sequence[int]) -> None:
        for place in places:
            self._counts[place] += 1

    def give_back(self, places: Ids) -> None:
        """`free` for distinct ids in an array, int64 [n]. Raises PoolError if one is not held, or named twice."""
        if len(places) < _MANY:
            self.free(self._listed(places))
            return
        self._check_given(places)
        self._free.frombytes(self._drop(places).tobytes())

    def _listed(self, ids: Ids) -> list[int]:
        """These few ids one by one. Raises PoolError if one is named twice."""
        listed: list[int] = ids.tolist()
        if len(set(listed)) < len(listed):
            raise PoolError(f"{self._what}s {listed} were named, some of them twice")
        return listed

    def _check_given(self, ids: Ids) -> None:
        """Raise PoolError unless all of these are held and none is named twice."""
        if not self._held_and_distinct(ids):
            raise PoolError(f"{self._what}s {ids.tolist()} were named, which are not all held, or some of them twice")

    def _held_and_distinct(self, ids: Ids) -> bool:
        """Whether all of these are held and none is named twice: each then keeps the mark of its own place."""
        # As unsigned numbers, negative ones are too large as well.
        if np.count_nonzero(ids.view(np.uint64) >= self.capacity) or not self._count_array[ids].all():
            return False
        order = np.arange(len(ids))
        self._marks[ids] = order
        return bool((self._marks[ids] == order).all())

    def check(self) -> None:
        """Prove that every id is free or held, never both, never neither. Raises PoolError."""
        free = np.bincount(self._resting(), minlength=self.capacity)
        counts = self._count_array
        for place in np.flatnonzero((counts < 0) | (free != (counts == 0))).tolist():
            raise PoolError(f"{self._what} {place} has count {counts[place]} and is free {free[place]}×")

    def _resting(self) -> Ids:
        """The ids that nobody holds, int64."""
        return np.array(self._free, dtype=np.int64)
