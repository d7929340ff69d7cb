"""The series of one process, and what of them travels: snapshots."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric as Family

from specserve.metrics.table import ALIASES, OTHER, Metric

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and its labels in order."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All samples of one process at one moment. `life` is new with each process, `number` rises within it."""

    life: str
    number: int
    values: Mapping[Series, float]


class Board:
    """The metrics of one table in a registry of their own, with constant labels in front."""

    def __init__(self, table: Iterable[Metric], constant: Mapping[str, str]) -> None:
        self._registry = CollectorRegistry()
        self._constant = tuple(constant.values())
        self._table = {metric.name: metric for metric in table}
        self._families = {name: self._family(metric, tuple(constant)) for name, metric in self._table.items()}
        self._series: dict[tuple[str, ...], Any] = {}
        self._life = secrets.token_hex(8)
        self._number = 0
        for name, metric in self._table.items():
            for values in metric.from_the_start:
                self.series(name, *values)

    def series(self, name: str, *values: str) -> Any:
        """The counter, gauge or histogram for label values, made at 0 when it is new."""
        key = (name, *values)
        found = self._series.get(key)
        if found is None:
            family, labels = self._families[name], (*self._constant, *values)
            found = self._series[key] = family.labels(*labels) if labels else family
        return found

    def listed(self, name: str, value: str) -> Any:
        """The series of a one-label family; a value that is not in the table counts as "other"."""
        known = next(iter(self._table[name].labels.values()))
        return self.series(name, value if value in known else OTHER)

    def snapshot(self) -> Snapshot:
        """Every sample as it stands."""
        self._number += 1
        values: dict[Series, float] = {}
        for family in self._registry.collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):  # they double the text, and nothing here reads them
                    values[sample.name, tuple(sample.labels.items())] = sample.value
        return Snapshot(self._life, self._number, values)

    def render(self) -> str:
        """Prometheus text format 0.0.4 of this process alone."""
        return render(self.snapshot().values, self._table.values())

    def _family(self, metric: Metric, constant: tuple[str, ...]) -> Any:
        labels = (*constant, *metric.labels)
        if metric.kind == "histogram":
            return Histogram(metric.name, metric.help, labels, registry=self._registry, buckets=metric.buckets)
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(metric.name, metric.help, labels, registry=self._registry)


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


def observe(histogram: Histogram, value: float, times: int) -> None:
    """Observe the same value so many times, at the cost of once. prometheus_client has no such call."""
    histogram._sum.inc(value * times)
    histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(times)


class _Collected:
    """Families as the text writer wants them."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families
