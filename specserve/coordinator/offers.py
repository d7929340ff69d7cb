"""Which of the drafted tokens are checked: the surest of the whole batch, as many as make most tokens per second.

A draft says how sure it seems of each token, and what it said is set right by how often such tokens were kept. So where
a row more is dear, as with many requests at once, the target checks only what will most likely stay. (Drafts cut where
they are unsure: Kangaroo, Liu et al. 2024; EAGLE-2, Li et al. 2024. Here all requests share one measure.)

Where tokens are drawn, whether one is offered must not depend on which it is. Its own worth looks at the dist that it
was drawn from only. But those of tokens behind it look at what it is, and so may those of another request, which draws
with the same noise where it has the same seed. So of first tokens, whose worths no draw of this round has a part in,
the best are taken, and behind them each request goes on by itself, as long as a token is worth its price.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np

from specserve.coordinator.acceptance import RequestClass
from specserve.coordinator.marginal_gain import Seconds
from specserve.coordinator.round_costs import FloatArray
from specserve.transport.messages import Array

_BINS = 8
"""Ranges of sureness, each of which learns for itself how often such tokens are kept."""

_PRIOR = 8.0
"""Tokens that what a draft says of itself counts for, in each range."""

_FADE = 0.998
"""Of what was seen of a range, with each token more."""

_REMEMBERED, _OWN = 48, 8
"""Drafts of a class that are remembered, and those of one request from which on only these stand for it."""

_SCENARIOS = 16
"""Rounds that are imagined for each estimate; fewer where many requests make each of them average by itself."""

_NEVER_S = 1e9
"""The cost of a round of which nothing is known."""


class Calibration:
    """How often tokens are kept of which the draft seems so sure."""

    def __init__(self) -> None:
        self._kept, self._hoped = np.zeros(_BINS), np.zeros(_BINS)

    def chances(self, sureness: FloatArray) -> FloatArray:
        """What sureness of any shape amounts to."""
        ratio = (self._kept + _PRIOR / 2) / (self._hoped + _PRIOR / 2)
        return np.minimum(1.0, sureness * ratio[_bins(sureness)], dtype=np.float64)

    def observe(self, sureness: FloatArray, kept: Array) -> None:
        """Of offered tokens [n], kept bool [n] were those that are true."""
        bins = _bins(sureness)
        fade = _FADE ** np.bincount(bins, minlength=_BINS)
        self._kept = fade * self._kept + np.bincount(bins, kept, _BINS)
        self._hoped = fade * self._hoped + np.bincount(bins, sureness, _BINS)


def _bins(sureness: FloatArray) -> Array:
    return np.minimum((sureness * _BINS).astype(np.int64), _BINS - 1)


class Sureness:
    """What drafts said of themselves lately, by class of request and by request, and what that amounts to."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._calibrations: dict[RequestClass, Calibration] = {}
        self._classes: dict[RequestClass, deque[Sequence[float]]] = {}
        self._rows: dict[int, deque[Sequence[float]]] = {}
        self._noise = random.Random(0)

    def knows(self, kind: RequestClass) -> bool:
        """Whether drafts of this class were seen."""
        return kind in self._classes

    def keep(self, rows: Sequence[int]) -> None:
        """Forget the requests that are none of these."""
        self._rows = {row: self._rows[row] for row in rows if row in self._rows}

    def saw(self, row: int, kind: RequestClass, sureness: Sequence[float]) -> None:
        """A draft for this request said so; there is at least one token."""
        self._classes.setdefault(kind, deque(maxlen=_REMEMBERED)).append(sureness)
        self._rows.setdefault(row, deque(maxlen=_REMEMBERED)).append(sureness)

    def observe(self, kinds: Sequence[RequestClass], told: Sequence[Sequence[float]], kept: Sequence[int]) -> None:
        """Tokens of such sureness were offered for requests of these classes, and so many of them kept."""
        for kind in set(kinds):
            tried: list[float] = []
            good: list[bool] = []
            for each, sureness, count in zip(kinds, told, kept, strict=True):
                if each == kind:
                    seen = sureness[: count + 1]
                    tried += seen
                    good += [place < count for place in range(len(seen))]
            self._calibration(kind).observe(np.array(tried), np.array(good))

    def worths(self, kinds: Sequence[RequestClass], told: Sequence[Sequence[float]]) -> FloatArray:
        """float64 [requests, longest] of drafts of these classes: how likely each token is kept, with all before it.

        0 where a draft has no more.
        """
        longest = max(map(len, told))
        sureness = np.array([[*draft, *[0.0] * (longest - len(draft))] for draft in told])
        for kind, places in _places_of(kinds).items():
            sureness[places] = self._calibration(kind).chances(sureness[places])
        return np.cumprod(sureness, axis=1, dtype=np.float64)

    def _calibration(self, kind: RequestClass) -> Calibration:
        return self._calibrations.setdefault(kind, Calibration())

    def imagined(self, rows: Sequence[int], kinds: Sequence[RequestClass]) -> FloatArray:
        """float64 [rounds, rows, depth] worths of drafts such as these requests had. All classes are known.

        What was not drafted so deep is held to lose as much with each token more as on average so far.
        """
        rounds = max(2, _SCENARIOS // len(rows))
        unknown = [float("nan")] * self._depth
        told: list[list[list[float]]] = []
        for row, kind in zip(rows, kinds, strict=True):
            own = self._rows.get(row, ())
            seen = own if len(own) >= _OWN else self._classes[kind]
            told.append([[*draft, *unknown][: self._depth] for draft in self._noise.choices(seen, k=rounds)])
        chances = np.array(told).swapaxes(0, 1)
        for kind, places in _places_of(kinds).items():
            mine = chances[:, places]
            known = ~np.isnan(mine)
            mine[known] = self._calibration(kind).chances(mine[known])
            mine[~known] = mine[known].mean()
            chances[:, places] = mine
        return np.cumprod(chances, axis=2, dtype=np.float64)


def _places_of(kinds: Sequence[RequestClass]) -> dict[RequestClass, list[int]]:
    places: dict[RequestClass, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return places


def best_end(worths: FloatArray, rows: int, seconds: FloatArray) -> int:
    """How many tokens of these worths [n], falling, make most tokens per second; seconds [n + 1] by how many."""
    goodput = (rows + np.concatenate([[0.0], np.cumsum(worths)])) / seconds
    return int(goodput.argmax())


def offered(worths: FloatArray, end: int) -> list[int]:
    """How many tokens of each draft are among the `end` most valuable ones of all; worths [drafts, n], falling."""
    order = np.argsort(-worths.ravel(), kind="stable")  # of equal ones those that stand before the others
    counts: list[int] = np.bincount(order[:end] // worths.shape[1], minlength=len(worths)).tolist()
    return counts


def offered_blindly(worths: FloatArray, rows: int, seconds: FloatArray) -> list[int]:
    """How many tokens of each draft to offer where they were drawn; see the module.

    worths [drafts, n] as in `offered`; seconds [2 · drafts + 1] of a round of these rows, by how many are offered. What
    a token behind a first one is to be worth is what one more costs beyond those.
    """
    drafts = len(worths)
    known = np.minimum(seconds, _NEVER_S)  # what was never measured may be infinite
    firsts = -np.sort(-worths[:, 0])
    end = best_end(firsts, rows, known[: drafts + 1])
    price = (known[end + drafts] - known[end]) / drafts * (rows + firsts[:end].sum()) / known[end]
    worthy = np.cumprod((worths[:, 1:] >= price) & (worths[:, 1:] > 0), axis=1).sum(axis=1).tolist()
    return [first + more if first else 0 for first, more in zip(offered(worths[:, :1], end), worthy, strict=True)]


def goodputs(
    imagined: FloatArray, limits: Array, rows: int, seconds: Seconds, drafting_s: Sequence[float]
) -> FloatArray:
    """float64 [depth, 2]: tokens per second, and tokens offered, of rounds with drafts of one level, two, ….

    imagined [rounds, drafts, depth] are worths, of which limits [drafts] levels each may be had, beside rows in all;
    drafting_s [depth] is what a round waits for drafts of so many levels.
    """
    rounds, drafts, depth = imagined.shape
    allowed = np.where(np.arange(depth) < limits[:, None], imagined, 0.0)
    round_s = seconds(np.arange(drafts * depth + 1, dtype=np.float64))
    found = np.empty((depth, 2))
    for level in range(depth):
        worths = -np.sort(-allowed[:, :, : level + 1].reshape(rounds, -1), axis=1)
        made = rows + np.concatenate([np.zeros((rounds, 1)), np.cumsum(worths, axis=1)], axis=1)
        taken = round_s[: made.shape[1]] + drafting_s[level]
        ends = (made / taken).argmax(axis=1)
        every = np.arange(rounds)
        found[level] = made[every, ends].sum() / taken[ends].sum(), ends.mean()
    return found
