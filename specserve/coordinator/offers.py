"""Which of the drafted tokens are checked: the surest of the whole batch, as many as make most tokens per second.

A draft says how sure it seems of each token, and what it said is set right by how often such tokens were kept. So where
a row more is dear, as with many requests at once, the target checks only what will most likely stay. (Drafts cut where
they are unsure: Kangaroo, Liu et al. 2024; EAGLE-2, Li et al. 2024. Here all requests share one measure.)

Where tokens are drawn, whether one is offered must not depend on which it is. Its own worth looks at the dist that it
was drawn from only. But those of tokens behind it look at what it is, and so may those of another request, which draws
with the same noise where it has the same seed. So of first tokens, whose worths no draw of this round has a part in,
the best are taken, and behind them each request goes on by itself, as long as a token is worth its price.

A chain is a tree whose every token has one child. Of siblings one is never offered without those before it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import chain as chained
from typing import NamedTuple, TypeVar

import numpy as np

from specserve.coordinator.acceptance import RequestClass
from specserve.coordinator.marginal_gain import Seconds
from specserve.coordinator.round_costs import FloatArray
from specserve.coordinator.trees import levels_of
from specserve.transport.messages import Array

Kind = TypeVar("Kind", RequestClass, RequestClass | None)

_BINS = 8
"""Ranges of sureness, each of which learns for itself how often such tokens are kept."""

_PRIOR = 8.0
"""Tokens that what a draft says of itself counts for, in each range."""

_FADE = 0.998
"""Of what was seen of a range, with each token more."""

_REMEMBERED, _OWN = 48, 8
"""Drafts of a class that are remembered, and those of one request, or large ones, from which on only these count."""

_GOING_ON = 2
"""Paths that would go on where a tree ends."""

_SCENARIOS = 48
"""Rounds that are imagined for each estimate; fewer where many requests make each of them average by itself."""

_NEVER_S = 1e9
"""The cost of a round of which nothing is known."""


class Told(NamedTuple):
    """What was said of a draft: how sure it is of each token behind the one before it, which `parents` number.

    −1 stands for what is committed. Tokens stand behind their parents, siblings one behind the other.
    """

    sureness: Sequence[float]
    parents: Sequence[int]


class Worths(NamedTuple):
    """How likely each token is kept: float64 [drafts, n], 0 where a draft has no more, with its parent and its level.

    Levels count from 0. Along each path, and from sibling to sibling, values fall.
    """

    values: FloatArray
    parents: Array
    levels: Array


class DraftSize(NamedTuple):
    """Levels and nodes of each of a round's drafts, and how long the round waits for them."""

    levels: int
    nodes: int
    waited_s: float


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
        self._classes: dict[RequestClass, deque[Told]] = {}
        self._large: dict[RequestClass, deque[Told]] = {}  # those that were as large as any may be
        self._rows: dict[int, deque[Told]] = {}  # likewise, by request
        self._noise = random.Random(0)

    def knows(self, kind: RequestClass) -> bool:
        """Whether drafts of this class were seen."""
        return kind in self._classes

    def keep(self, rows: Sequence[int]) -> None:
        """Forget the requests that are none of these."""
        self._rows = {row: self._rows[row] for row in rows if row in self._rows}

    def saw(self, row: int, kind: RequestClass, told: Told, *, large: bool = True) -> None:
        """A draft for this request said so; there is at least one token. large: none may have more nodes than it."""
        self._classes.setdefault(kind, deque(maxlen=_REMEMBERED)).append(told)
        if large:
            self._large.setdefault(kind, deque(maxlen=_REMEMBERED)).append(told)
            self._rows.setdefault(row, deque(maxlen=_REMEMBERED)).append(told)

    def observe(self, kinds: Sequence[RequestClass], tried: Sequence[Sequence[tuple[float, bool]]]) -> None:
        """For requests of these classes it was the turn of tokens of such sureness; those that are true were kept."""
        for kind, places in _places_of(kinds).items():
            turns = [turn for place in places for turn in tried[place]]
            self._calibration(kind).observe(*(np.array(column) for column in zip(*turns, strict=True)))

    def worths(self, kinds: Sequence[RequestClass | None], told: Sequence[Told]) -> Worths:
        """Of drafts of these classes, at least one; None where what is said is right already."""
        return _along(self._chances(kinds, told), [each.parents for each in told])

    def _chances(self, kinds: Sequence[RequestClass | None], told: Sequence[Told]) -> list[list[float]]:
        """What these drafts said of their tokens, set right."""
        found: list[list[float]] = [[]] * len(told)
        for kind, places in _places_of(kinds).items():
            said = np.array([sure for place in places for sure in told[place].sureness])
            chances = (said if kind is None else self._calibration(kind).chances(said)).tolist()
            at = 0
            for place in places:
                end = at + len(told[place].sureness)
                found[place], at = chances[at:end], end
        return found

    def _calibration(self, kind: RequestClass) -> Calibration:
        return self._calibrations.setdefault(kind, Calibration())

    def imagined(self, rows: Sequence[int], kinds: Sequence[RequestClass]) -> list[Worths]:
        """Rounds with drafts such as these requests had. All classes are known.

        What was not drafted so deep is held to go on behind its first tokens with one token each level, and to lose as
        much with each as first siblings did on average so far.
        """
        count, rounds = len(rows), max(2, _SCENARIOS // len(rows))
        drawn: list[list[Told]] = []
        for row, kind in zip(rows, kinds, strict=True):
            large = self._rows.get(row, ()), self._large.get(kind, ())
            seen = next((each for each in large if len(each) >= _OWN), self._classes[kind])
            drawn.append(self._noise.choices(seen, k=rounds))
        told, all_kinds = list(chained.from_iterable(zip(*drawn, strict=True))), list(kinds) * rounds
        chances, parents = self._chances(all_kinds, told), [list(each.parents) for each in told]
        for places in _places_of(all_kinds).values():
            first = [sure for place in places for sure in _of_eldest(chances[place], parents[place])]
            usual = sum(first) / len(first)
            for place in places:
                _deepen(chances[place], parents[place], self._depth, usual)
        found = _along(chances, parents)
        return [Worths(*(column[at : at + count] for column in found)) for at in range(0, count * rounds, count)]


def _places_of(kinds: Sequence[Kind]) -> dict[Kind, list[int]]:
    places: dict[Kind, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return places


def _of_eldest(chances: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Those of tokens without siblings before them."""
    return [chance for at, chance in enumerate(chances) if not at or parents[at] != parents[at - 1]]


def _deepen(chances: list[float], parents: list[int], depth: int, chance: float) -> None:
    """Add paths down to level `depth` behind the first tokens of a draft's deepest level, all of the same chance."""
    levels = levels_of(parents)
    more = depth - levels[-1] - 1
    if more > 0:
        for end in [number for number, level in enumerate(levels) if level == levels[-1]][:_GOING_ON]:
            parents += [end, *range(len(parents), len(parents) + more - 1)]
            chances += [chance] * more


def _along(chances: Sequence[Sequence[float]], parents: Sequence[Sequence[int]]) -> Worths:
    """Chances multiplied along paths. In plain Python: drafts are many and small."""
    longest = max(map(len, parents))
    rows: list[list[float]] = []
    above: list[list[int]] = []
    levels: list[list[int]] = []
    for mine, before in zip(chances, parents, strict=True):
        worths: list[float] = []
        for at, (chance, parent) in enumerate(zip(mine, before, strict=True)):
            worth = chance * worths[parent] if parent >= 0 else chance
            worths.append(min(worth, worths[-1]) if at and before[at - 1] == parent else worth)
        none = longest - len(worths)
        rows.append([*worths, *[0.0] * none])
        above.append([*before, *[-1] * none])
        levels.append([*levels_of(before), *[0] * none])
    return Worths(np.array(rows), np.array(above), np.array(levels))


def best_end(worths: FloatArray, rows: int, seconds: FloatArray) -> int:
    """How many tokens of these worths [n], falling, make most tokens per second; seconds [n + 1] by how many."""
    goodput = (rows + np.concatenate([[0.0], np.cumsum(worths)])) / seconds
    return int(goodput.argmax())


def offered(worths: FloatArray, end: int) -> Array:
    """bool [drafts, n]: the `end` most valuable tokens of all; worths [drafts, n] as those of `Worths`.

    Those worth nothing are none of them: there may be no such token.
    """
    chosen = np.zeros(worths.size, dtype=bool)
    chosen[np.argsort(-worths.ravel(), kind="stable")[:end]] = True  # of equal ones those that stand before the others
    found: Array = chosen.reshape(worths.shape) & (worths > 0)
    return found


def offered_blindly(worths: Worths, rows: int, seconds: FloatArray) -> Array:
    """bool [drafts, n]: the tokens to offer where they were drawn; see the module.

    seconds [firsts + drafts + 1] of a round of these rows, by how many are offered, of so many first tokens. What a
    token behind a first one is to be worth is what one more costs beyond those.
    """
    values, drafts = worths.values, len(worths.values)
    known = np.minimum(seconds, _NEVER_S)  # what was never measured may be infinite
    firsts = np.where(worths.levels == 0, values, 0.0)
    count = len(seconds) - drafts - 1
    falling = -np.sort(-firsts, axis=None)[:count]
    end = best_end(falling, rows, known[: count + 1])
    price = (known[end + drafts] - known[end]) / drafts * (rows + falling[:end].sum()) / known[end]
    chosen = offered(firsts, end)
    worthy = (values >= price) & (values > 0)
    every = np.arange(drafts)
    for at, above in enumerate(worths.parents.T):
        chosen[:, at] |= (above >= 0) & chosen[every, above] & worthy[:, at]
    return chosen


def best_size(
    imagined: Sequence[Worths], limits: Array, rows: int, seconds: Seconds, sizes: Sequence[DraftSize]
) -> tuple[DraftSize, float, float]:
    """The size of drafts that makes most tokens per second, with that figure and with the tokens offered of them.

    Of each of the imagined rounds' drafts limits [drafts] levels may be had, beside rows in all. Of a smaller tree are
    had those of the imagined one's tokens that are worth most.
    """
    values, _, levels = (np.array(column) for column in zip(*imagined, strict=True))  # [rounds, drafts, n]
    allowed = np.where(levels < limits[:, None], values, 0.0)
    rounds = len(allowed)
    round_s = seconds(np.arange(allowed[0].size + 1, dtype=np.float64))
    every = np.arange(rounds)
    best: tuple[DraftSize, float, float] | None = None
    within: dict[int, FloatArray] = {}  # by number of levels, falling in each draft
    for size in sizes:
        if size.levels not in within:
            within[size.levels] = -np.sort(-np.where(levels < size.levels, allowed, 0.0), axis=2)
        worths = -np.sort(-within[size.levels][:, :, : size.nodes].reshape(rounds, -1), axis=1)
        made = rows + np.concatenate([np.zeros((rounds, 1)), np.cumsum(worths, axis=1)], axis=1)
        taken = round_s[: made.shape[1]] + size.waited_s
        ends = (made / taken).argmax(axis=1)
        goodput = float(made[every, ends].sum() / taken[ends].sum())
        if best is None or goodput > best[1]:
            best = size, goodput, float(ends.mean())
    if best is None:
        raise ValueError("no size of drafts to choose from")
    return best
