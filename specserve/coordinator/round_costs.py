"""What rounds cost, in units of a pace that they share: a Gaussian belief of logarithms, one Kalman step a measurement.

A machine's pace changes, by a factor of two within seconds, and what slows down one kind of round slows down all of
them. So a round is held to take pace times cost, and only costs, which change slowly, say what pays. The pace follows
what was just measured; a cost learns from how its rounds compare with others near them in time. Which of both a
measurement speaks of, and how sure the comparison of two kinds is, the covariances know: rounds of one kind in a row
move the pace, and leave what is known of costs, until another kind is measured beside them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.coordinator.costs import NO_TIME_S, PER_DOUBLING, SIZE_WEIGHT, bin_of, rising

FloatArray = NDArray[np.float64]

_NOISE, _LEAST_NOISE = 0.06, 0.02
"""Spread of rounds that are alike, in logarithms as all that follows: before it was seen, and at least."""

_NOISE_WEIGHT = 0.03
"""Of one measurement in what that spread is held to be."""

_EARLY_NOISE = 1.0
"""More spread of the first measurements of a size, over the cube of their number: they hold first-time costs. The very
first one is not believed at all."""

_PACE_DRIFT, _COST_DRIFT = 0.03, 0.003
"""What the pace, and the cost of each size for itself, may change by from round to round."""

_AGES, _FORGOTTEN = 25, 0.7
"""Rounds, of those that could have had a size and had another, until its cost may change twice as much with each, and
so on: what is not looked at may have jumped. And the spread from which on it is forgotten, so that what was measured in
a bad hour keeps nobody from trying again."""

_LATE = 2.5
"""Spreads from what was expected on that a measurement counts as late (or early), and no further than so much."""

_BELIEVED_LATE = 0.5
"""Of what a late round was beyond that, what the next one may confirm: as a new pace where the size is well known, as
its cost where it is not."""

_SLOPE = 0.3
"""How much of a size's growth, in logarithms, its cost is held to grow by beyond what was measured."""

_GROWTH = 2.0
"""No round checks more than so many times the positions of the largest round that was measured."""

_BY_DOUBLING, _KINDS_APART = 0.15, 0.3
"""Before it was measured: spread of a size's cost around that of one half as large; and how many doublings the same
size in another kind of round counts as apart."""

_LEARNED = 4
"""Measurements of a size from which on what is off about it says how much noise there is."""

_UNKNOWN = 1.0
"""Spread where there is nothing to go by."""


class Kind:
    """The sizes of one kind of step that were measured. index: of their costs among all that is believed."""

    def __init__(self, *like: Kind) -> None:
        self.like = like  # kinds that cost about the same at the same size
        self.places: list[float] = []  # log2 of the sizes, rising
        self.index: list[int] = []
        self.counts: list[int] = []
        self.bins: list[int] = []
        self.seen: set[int] = set()  # bins that were measured at least once


@dataclass(frozen=True, slots=True)
class Mix:
    """Where a size stands: so much of one cost, the rest of another, and what is unknown beside them."""

    lower: int
    upper: int
    share: float  # of the upper one
    spread: float = 0.0


class RoundCosts:
    """Costs of rounds of decode rows, the coordinator's time included, by what was measured.

    plain: while nothing is drafted; bare: no drafts to check, though drafting goes on; both by rows. checked: with
    drafts, by positions. Taken off them and kept apart is what a round waits for its drafts: by step, by the tokens
    that a step makes, at least one for each row, and by levels, as the first step also reads what the draft lacks. A
    cost is seconds at the pace that was there when the first round came. What took no finite number of seconds says
    nothing: believed once, it would leave nothing that is a number.
    """

    def __init__(self) -> None:
        self.plain = Kind()
        self.bare = Kind(self.plain)
        self.checked = Kind(self.bare, self.plain)
        self.plain.like = (self.bare, self.checked)
        self.bare.like = (self.plain, self.checked)
        self._draft_steps: dict[int, Kind] = {}
        self._mean = np.zeros(1)  # of logarithms: the pace, and costs
        self._spread = np.zeros((1, 1))  # their covariances
        self._age = np.zeros(1)  # rounds that could have measured each of them, since one did
        self._places = np.full(1, np.nan)  # log2 of the size whose cost each of them is
        self._noise = _NOISE**2
        self._fits: dict[tuple[int, float], tuple[list[float], list[float]]] = {}  # of `_curve`, until more is learned
        self._step_fits: dict[int, tuple[list[float], list[float]]] = {}  # of `_step_fit`, as long

    # ---- learning

    def pass_round(self, rows: int, most: int, rounds: int = 1) -> None:
        """So many more are over, which could have had sizes from `rows` to `most`: what was known of them is older."""
        self._age += rounds * ((self._places >= math.log2(rows)) & (self._places <= math.log2(most)))
        drift = rounds * (_COST_DRIFT * (1 + self._age / _AGES)) ** 2
        drift[0] = rounds * _PACE_DRIFT**2
        known = self._spread.flat[:: len(self._mean) + 1] + drift
        self._spread.flat[:: len(self._mean) + 1] = known
        known[0] = 0.0
        oldest = int(known.argmax())
        if known[oldest] > _FORGOTTEN**2 and self._age[oldest] > _AGES:
            self._forget(oldest)

    def _forget(self, index: int) -> None:
        """As if this cost had never been measured."""
        for kind in (self.plain, self.bare, self.checked, *self._draft_steps.values()):
            if index in kind.index:
                at = kind.index.index(index)
                for column in (kind.places, kind.index, kind.counts, kind.bins):
                    del column[at]
            kind.index = [each - (each > index) for each in kind.index]
        for levels in [levels for levels, kind in self._draft_steps.items() if not kind.index]:
            del self._draft_steps[levels]
        self._mean, self._age = np.delete(self._mean, index), np.delete(self._age, index)
        self._places = np.delete(self._places, index)
        self._spread = np.delete(np.delete(self._spread, index, 0), index, 1)
        self._fits.clear()
        self._step_fits.clear()

    def observe(self, kind: Kind, size: int, seconds: float) -> None:
        """A round of this kind and size, at least 1, took this long, without its drafts."""
        if not math.isfinite(seconds):
            return
        key = bin_of(size)
        if key in kind.seen:
            self._learn(kind, size, seconds)
        kind.seen.add(key)

    def observe_draft(self, levels: int, tokens: int, seconds: float) -> None:
        """A round waited so long for drafts of so many levels, of `tokens` each."""
        if not math.isfinite(seconds):
            return
        kind = self._draft_steps.get(levels)
        if kind is None:
            nearest = sorted(self._draft_steps, key=lambda each: abs(each - levels))
            kind = self._draft_steps[levels] = Kind(*(self._draft_steps[each] for each in nearest))
        self._learn(kind, tokens, seconds / levels)

    def _learn(self, kind: Kind, size: int, seconds: float) -> None:
        taken = math.log(max(seconds, NO_TIME_S))
        at = self._place(kind, size, taken)
        here, mean, spread = kind.index[at], self._mean, self._spread
        kind.counts[at] += 1
        towards = spread[:, 0] + spread[:, here]
        noise = self._noise + (_EARLY_NOISE / (kind.counts[at] + 1) ** 3) ** 2
        variance = float(towards[0] + towards[here]) + noise
        off = taken - float(mean[0] + mean[here])
        most = _LATE * math.sqrt(variance)
        believed = min(max(off, -most), most)
        mean += towards * (believed / variance)
        spread -= np.outer(towards, towards / variance)
        count = kind.counts[at]
        surprise = (_BELIEVED_LATE * (off - believed)) ** 2
        spread[0, 0] += surprise * (1 - 1 / count)
        spread[here, here] += surprise / count
        self._age[here] = 0
        if count > _LEARNED:
            self._noise = max(_LEAST_NOISE**2, self._noise + _NOISE_WEIGHT * (believed**2 - variance))
        self._fits.clear()
        self._step_fits.clear()

    def _place(self, kind: Kind, size: int, taken: float) -> int:
        """Where this size is among those of its kind; a new one begins with what it most resembles."""
        key, place = bin_of(size), math.log2(size)
        at = bisect_right(kind.bins, key) - 1
        if at >= 0 and kind.bins[at] == key:
            kind.places[at] += SIZE_WEIGHT * (place - kind.places[at])
            return at
        mix = self._mix(kind, place)
        count = len(self._mean)
        spread = np.zeros((count + 1, count + 1))
        spread[:count, :count] = self._spread
        if mix is None:
            start, spread[count, count] = taken - float(self._mean[0]), _UNKNOWN**2
        else:
            start = (1 - mix.share) * float(self._mean[mix.lower]) + mix.share * float(self._mean[mix.upper])
            row = (1 - mix.share) * self._spread[mix.lower] + mix.share * self._spread[mix.upper]
            spread[count, :count] = spread[:count, count] = row
            spread[count, count] = (1 - mix.share) * row[mix.lower] + mix.share * row[mix.upper] + mix.spread**2
        self._mean, self._spread = np.append(self._mean, start), spread
        self._age, self._places = np.append(self._age, 0), np.append(self._places, place)
        kind.places.insert(at + 1, place)
        for column, value in ((kind.bins, key), (kind.index, count), (kind.counts, 0)):
            column.insert(at + 1, value)
        return at + 1

    # ---- reading

    def _mix(self, kind: Kind, place: float) -> Mix | None:
        """What a size is like that was perhaps never measured: its neighbours, of this kind or of one like it."""
        lower: tuple[float, int] | None = None
        upper: tuple[float, int] | None = None
        for each in (kind, *kind.like):
            away = 0.0 if each is kind else _KINDS_APART
            at = bisect_right(each.places, place)
            if at and (lower is None or each.places[at - 1] - away > lower[0]):
                lower = each.places[at - 1] - away, each.index[at - 1]
            if at < len(each.places) and (upper is None or each.places[at] + away < upper[0]):
                upper = each.places[at] + away, each.index[at]
        if lower is None or upper is None:
            end = lower or upper
            if end is None:
                return None
            return Mix(end[1], end[1], 0.0, _BY_DOUBLING * math.sqrt(abs(place - end[0])))
        gap = upper[0] - lower[0]
        share = (place - lower[0]) / gap
        # Costs are nearer to a line of the size than of its logarithm.
        linear = (2.0 ** (share * gap) - 1) / (2.0**gap - 1)
        return Mix(lower[1], upper[1], linear, _BY_DOUBLING * math.sqrt(gap * share * (1 - share)))

    def measured(self, kind: Kind, size: int) -> bool:
        """Whether rounds of this kind and size were measured, and more than once."""
        key = bin_of(size)
        return key in kind.bins and kind.counts[kind.bins.index(key)] > 1

    @property
    def pace(self) -> float:
        """How many times as long as at first the same takes now."""
        return math.exp(float(self._mean[0]))

    def knows(self, rows: int) -> bool:
        """Whether plain rounds of so many rows, within a factor of two, were measured."""
        return any(abs(place - math.log2(rows)) <= 1 for place in self.plain.places)

    def plain_s(self, rows: int) -> float | None:
        """The cost of plain decoding, by what resembles it most; None when nothing is known."""
        return self._at(self.plain, rows)

    def bare_s(self, rows: int) -> float | None:
        """The cost of a round that checks no drafts though some are made beside it; None when none was measured."""
        return self._at(self.bare, rows) if self.measured(self.bare, rows) else None

    def _at(self, kind: Kind, size: float) -> float | None:
        mix = self._mix(kind, math.log2(size))
        if mix is None:
            return None
        mean = self._mean
        return math.exp((1 - mix.share) * float(mean[mix.lower]) + mix.share * float(mean[mix.upper]))

    def doubt(self, rows: int, positions: int) -> float:
        """The spread of how checking so many positions compares with a plain round, in logarithms."""
        plain, checked = self._mix(self.plain, math.log2(rows)), self._mix(self.checked, math.log2(positions))
        if plain is None or checked is None:
            return _UNKNOWN
        weights = np.zeros(len(self._mean))
        for mix, sign in ((plain, 1.0), (checked, -1.0)):
            weights[mix.lower] += sign * (1 - mix.share)
            weights[mix.upper] += sign * mix.share
        variance = float(weights @ self._spread @ weights) + plain.spread**2 + checked.spread**2
        return math.sqrt(max(0.0, variance))

    def _doubts(self, index: Sequence[int]) -> FloatArray:
        """float64 [n] variances of these costs beside the one of them that is known best."""
        if not index:
            return np.zeros(0)
        variances = self._spread[index, index]
        sure = index[int(variances.argmin())]
        found: FloatArray = np.maximum(0.0, variances + self._spread[sure, sure] - 2 * self._spread[index, sure])
        return found

    def step_seconds(self) -> Callable[[FloatArray], FloatArray] | None:
        """float64 [m, n] costs of a step of drafting by float64 [m, n] tokens that it makes; None where nobody waits.

        One level is drafted in the first row, two in the second, ….
        """
        if not self._draft_steps:
            return None

        def costs(tokens: FloatArray) -> FloatArray:
            fits = [self._step_fit(at + 1) for at in range(len(tokens))]
            return np.array([np.interp(row, *fit) for row, fit in zip(tokens, fits, strict=True)])

        return costs

    def drafting(self, levels: int, tokens: float) -> float | None:
        """The cost of so many levels of drafts, of `tokens` each; None where nobody waits for drafts."""
        if not self._draft_steps:
            return None
        sizes, costs = self._step_fit(max(1, levels))
        return levels * float(np.interp(tokens, sizes, costs))

    def _step_fit(self, levels: int) -> tuple[list[float], list[float]]:
        """Tokens that a step makes where so many levels are drafted, or nearly so many, and what it costs."""
        if levels not in self._step_fits:
            kind = self._draft_steps[min(self._draft_steps, key=lambda each: abs(each - levels))]
            weights = 1 / (self._doubts(kind.index) + _LEAST_NOISE**2)
            costs = rising(np.exp(self._mean[kind.index]).tolist(), weights.tolist())
            self._step_fits[levels] = [2**place for place in kind.places], costs
        return self._step_fits[levels]

    def seconds(self, rows: int, slots: FloatArray, hopes: float = 0.0) -> FloatArray:
        """float64 [n] costs for float64 [n] slots, of which none is a plain round. Only when something is known.

        hopes: so many spreads less than what is expected. No round with drafts costs less than one without: more work
        takes no less time, so what says otherwise is noise. What is much larger than all that was measured costs
        too much.
        """
        plain = self.plain_s(rows) or 0.0
        sizes, costs = self._curve(rows, plain, hopes)
        return np.interp(rows + slots, sizes, costs, right=np.inf)

    def _curve(self, rows: int, plain: float, hopes: float) -> tuple[list[float], list[float]]:
        """Positions from `rows` on, as far as rounds may grow, and costs, made to rise."""
        if (rows, hopes) not in self._fits:
            kind = self.checked
            first = bisect_right(kind.places, math.log2(rows))
            sizes = [2**place for place in kind.places[first:]]
            index = kind.index[first:]
            logs, doubts = self._mean[index], self._doubts(index)
            if hopes:
                logs = logs - hopes * np.sqrt(doubts)
            weights = (1 / (doubts + _LEAST_NOISE**2)).tolist()
            costs = [plain, *(max(plain, cost) for cost in rising(np.exp(logs).tolist(), weights))]
            sizes = [float(rows), *sizes]
            if hopes:
                sizes, costs = _with_middles(sizes, costs, hopes)
            sizes.append(_GROWTH * sizes[-1])
            costs.append(costs[-1] * max(1.0, _GROWTH**_SLOPE * math.exp(-hopes * _BY_DOUBLING)))
            self._fits[rows, hopes] = sizes, costs
        return self._fits[rows, hopes]


def _with_middles(sizes: Sequence[float], costs: Sequence[float], hopes: float) -> tuple[list[float], list[float]]:
    """With what is hoped of sizes between two that were measured and are far apart."""
    all_sizes, all_costs = [sizes[0]], [costs[0]]
    for size, cost in zip(sizes[1:], costs[1:], strict=True):
        gap = math.log2(size / all_sizes[-1])
        if gap > 2 / PER_DOUBLING:
            middle = math.sqrt(size * all_sizes[-1])
            share = (middle - all_sizes[-1]) / (size - all_sizes[-1])
            between = all_costs[-1] + share * (cost - all_costs[-1])
            all_costs.append(max(all_costs[-1], between * math.exp(-hopes * _BY_DOUBLING * math.sqrt(gap) / 2)))
            all_sizes.append(middle)
        all_sizes.append(size)
        all_costs.append(cost)
    return all_sizes, all_costs
