"""What a board is made of, without any of Grafana's own words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Unit = Literal["seconds", "bytes", "bytes/s", "ratio", "tokens", "tokens/s", "requests/s", "per second", "count"]
Kind = Literal["lines", "stacked", "number", "bars", "heatmap"]

GRID_WIDTH = 24
_MODEL = 'model_name=~"$model_name"'


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the name of its lines, with labels in double braces."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `help` says how to read it; width and height are in the grid's units, 24 to a line."""

    title: str
    kind: Kind
    unit: Unit
    queries: tuple[Query, ...]
    help: str
    width: int = 8
    height: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A panel, or the heading of a row, in the grid."""

    item: Panel | str
    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Board:
    """A page of panels. uid is part of its address and of its file's name."""

    uid: str
    title: str
    help: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All of them, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)

    def placed(self) -> Iterator[Placed]:
        """Headings and panels from left to right and top to bottom, without gaps in a line."""
        y = 0
        for row in self.rows:
            yield Placed(row.title, 0, y, GRID_WIDTH, 1)
            y, x, line = y + 1, 0, 0
            for panel in row.panels:
                if x + panel.width > GRID_WIDTH:
                    y, x, line = y + line, 0, 0
                yield Placed(panel, x, y, panel.width, panel.height)
                x, line = x + panel.width, max(line, panel.height)
            y += line


def series(name: str, *matchers: str) -> str:
    """All series of a metric for the chosen models."""
    return f"specserve_{name}{{{', '.join((_MODEL, *matchers))}}}"


def rate(name: str, *matchers: str) -> str:
    """Per second, over a window that fits the picture's resolution."""
    return f"rate({series(name, *matchers)}[$__rate_interval])"


def summed(name: str, *matchers: str, by: str = "") -> str:
    """The sum of the rates."""
    return f"sum{f' by ({by})' if by else ''} ({rate(name, *matchers)})"


def ratio(part: str, whole: str) -> str:
    """One sum over another, and nothing (not NaN) where the other is 0. Never a mean of ratios."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, histogram: str, *matchers: str, by: str = "") -> str:
    """A quantile of a histogram, and nothing where nothing was observed."""
    split = f"{by}, " if by else ""
    buckets = f"sum by ({split}le) ({rate(f'{histogram}_bucket', *matchers)})"
    count = f"sum{f' by ({by})' if by else ''} ({rate(f'{histogram}_count', *matchers)}) > 0"
    return f"histogram_quantile({q:g}, {buckets}) and{f' on ({by})' if by else ''} ({count})"


def quantiles(histogram: str) -> tuple[Query, ...]:
    """Median, p90 and p99."""
    return tuple(Query(quantile(q, histogram), f"p{100 * q:g}") for q in (0.5, 0.9, 0.99))


def mean(histogram: str, *matchers: str) -> str:
    """The mean of what was observed."""
    return ratio(summed(f"{histogram}_sum", *matchers), summed(f"{histogram}_count", *matchers))
