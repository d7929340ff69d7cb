"""The series of one process, and what of them travels: snapshots."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import Metric as Family

from specserve.metrics.table import ALIASES, OTHER, Metric

Labels = tuple[tuple[str, str], ...]
"""Names and values of labels, in order."""

Series = tuple[str, Labels]
"""A sample's name and its labels."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All samples of one process at one moment. `life` is new with each process, `number` rises within it."""

    life: str
    number: int
    values: Mapping[Series, float]


class Counter:
    """What only ever rises."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count so much more. Raises ValueError for less than nothing."""
        if amount < 0:
            raise ValueError(f"a counter cannot fall by {-amount}")
        self.value += amount

    def samples(self, name: str, labels: Labels) -> Iterable[tuple[Series, float]]:
        """Its samples, named as in the text format."""
        return (((name, labels), self.value),)


class Gauge:
    """A level."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        """It stands here now."""
        self.value = value

    def inc(self, amount: float = 1.0) -> None:
        """It stands so much higher, or lower."""
        self.value += amount

    def samples(self, name: str, labels: Labels) -> Iterable[tuple[Series, float]]:
        """See `Counter`."""
        return (((name, labels), self.value),)


class Histogram:
    """Values by size: how many were at most each bound, and the sum of all."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, buckets: Sequence[float]) -> None:
        """buckets are upper bounds, rising; one without bound comes behind them."""
        self._bounds = (*buckets, inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Take the same value in so many times."""
        self._sum += value * times
        self._counts[bisect_left(self._bounds, value)] += times

    def samples(self, name: str, labels: Labels) -> Iterable[tuple[Series, float]]:
        """See `Counter`."""
        counts = [float(count) for count in accumulate(self._counts)]
        for bound, count in zip(self._bounds, counts, strict=True):
            yield (f"{name}_bucket", (*labels, ("le", "+Inf" if bound == inf else str(float(bound))))), count
        yield (f"{name}_count", labels), counts[-1]
        yield (f"{name}_sum", labels), self._sum


_Kept: TypeAlias = Counter | Gauge | Histogram


class Board:
    """The metrics of one table, with constant labels in front.

    Each series is recorded by one thread, and snapshots may be taken by others. What is recorded is plain numbers: it
    happens dozens of times in a round of the coordinator, and `prometheus_client` takes a lock and looks for exemplars
    each time.
    """

    def __init__(self, table: Iterable[Metric], constant: Mapping[str, str]) -> None:
        self._constant = tuple(constant.items())
        self._table = {metric.name: metric for metric in table}
        self._kept: dict[tuple[str, ...], _Kept] = {}  # by name and label values
        self._life = secrets.token_hex(8)
        self._number = 0
        for name, metric in self._table.items():
            for values in metric.from_the_start:
                self._made(name, *values)

    def counter(self, name: str, *values: str) -> Counter:
        """The counter for label values, made at 0 when it is new."""
        found = self._kept.get((name, *values)) or self._made(name, *values)
        assert isinstance(found, Counter)
        return found

    def gauge(self, name: str, *values: str) -> Gauge:
        """Likewise a gauge."""
        found = self._kept.get((name, *values)) or self._made(name, *values)
        assert isinstance(found, Gauge)
        return found

    def histogram(self, name: str, *values: str) -> Histogram:
        """Likewise a histogram."""
        found = self._kept.get((name, *values)) or self._made(name, *values)
        assert isinstance(found, Histogram)
        return found

    def listed(self, name: str, value: str) -> Counter:
        """The counter of a one-label family; a value that is not in the table counts as "other"."""
        known = next(iter(self._table[name].labels.values()))
        return self.counter(name, value if value in known else OTHER)

    def counters(self, name: str) -> dict[tuple[str, ...], Counter]:
        """The counters of a family that exist from the start, by label values: for who counts often."""
        return {values: self.counter(name, *values) for values in self._table[name].from_the_start}

    def snapshot(self) -> Snapshot:
        """Every sample as it stands."""
        self._number += 1
        values: dict[Series, float] = {}
        for (name, *own), kept in list(self._kept.items()):  # a copy: the recording thread may make new ones
            labels = (*self._constant, *zip(self._table[name].labels, own, strict=True))
            values.update(kept.samples(name, labels))
        return Snapshot(self._life, self._number, values)

    def render(self) -> str:
        """Prometheus text format 0.0.4 of this process alone."""
        return render(self.snapshot().values, self._table.values())

    def _made(self, name: str, *values: str) -> _Kept:
        metric = self._table[name]
        if len(values) != len(metric.labels):
            raise ValueError(f"{name} has labels {', '.join(metric.labels)}, not {len(values)} of them")
        kept: _Kept
        match metric.kind:
            case "counter":
                kept = Counter()
            case "gauge":
                kept = Gauge()
            case "histogram":
                kept = Histogram(metric.buckets)
        self._kept[name, *values] = kept
        return kept


def render(values: Mapping[Series, float], table: Iterable[Metric], *, aliases: bool = False) -> str:
    """Prometheus text format 0.0.4 of these samples, family by family in the order of the table."""
    by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
    for (name, labels), value in values.items():
        by_name.setdefault(name, []).append((dict(labels), value))
    families = [_shown(metric, metric.name, by_name) for metric in table]
    if aliases:
        families += [
            _shown(metric, ALIASES[metric.name], {ALIASES[metric.name]: _as_engine_0(by_name.get(metric.name, []))})
            for metric in table
            if metric.name in ALIASES
        ]
    return generate_latest(_Collected(families)).decode("utf-8")


def _shown(metric: Metric, name: str, by_name: Mapping[str, list[tuple[dict[str, str], float]]]) -> Family:
    counter = metric.kind == "counter"
    family = Family(name.removesuffix("_total") if counter else name, metric.help, metric.kind)
    for sample in metric.sample_names if name == metric.name else (name,):
        for labels, value in by_name.get(sample, []):
            family.add_sample(sample, labels, value)
    return family


def _as_engine_0(samples: Iterable[tuple[dict[str, str], float]]) -> list[tuple[dict[str, str], float]]:
    """The label `engine` numbers the engines of one server there; here is one."""
    return [({**labels, "engine": "0"}, value) for labels, value in samples]


class _Collected:
    """Families as the text writer wants them."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families
