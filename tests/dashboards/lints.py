"""What can be wrong with a board, read off its JSON: each lint yields findings in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from specserve.metrics import ENGINE_METRICS, HTTP_METRICS, LEDGER_METRICS

TABLE = {metric.name: metric for metric in (*ENGINE_METRICS, *HTTP_METRICS, *LEDGER_METRICS)}
SAMPLES = {sample: metric for metric in TABLE.values() for sample in metric.sample_names}

_NAME = re.compile(r"\bspecserve_[a-z0-9_]+")


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def exprs(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def names_in(expr: str) -> set[str]:
    """Metric names; model labels and the like are not written with the prefix."""
    return set(_NAME.findall(expr))


def unknown_metrics(board: dict[str, Any]) -> Iterator[str]:
    for panel in panels(board):
        for expr in exprs(panel):
            for name in names_in(expr) - SAMPLES.keys():
                yield f"{panel['title']}: no metric {name}"


def unknown_labels(board: dict[str, Any]) -> Iterator[str]:
    """Labels that an expression selects or sums by, and those that a legend shows."""
    for panel in panels(board):
        for target in panel["targets"]:
            known = {"le", "model_name"} | {
                label for name in names_in(target["expr"]) for label in SAMPLES[name].labels
            }
            used = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
            used |= set(re.findall(r"[{,]\s*(\w+)(?:=~|!~|!=|=)", target["expr"]))
            for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", target["expr"]):
                used |= {label.strip() for label in group.split(",")}
            for label in used - known:
                yield f"{panel['title']}: no label {label} in {target['expr']}"


def missing_model(board: dict[str, Any]) -> Iterator[str]:
    """Series that carry a model name are selected by the variable."""
    for panel in panels(board):
        for expr in exprs(panel):
            for name, after in re.findall(r"\b(specserve_[a-z0-9_]+)(\{[^}]*\}|)", expr):
                if SAMPLES.get(name) in ENGINE_METRICS and 'model_name=~"$model_name"' not in after:
                    yield f"{panel['title']}: {name} of every model"


def units_against_names(board: dict[str, Any]) -> Iterator[str]:
    """Quantiles and means of seconds are shown in seconds, rates of bytes in bytes a second, and so on."""
    for panel in panels(board):
        unit = panel["fieldConfig"]["defaults"].get("unit")
        for expr in exprs(panel):
            expected = unit_of(expr)
            if expected is not None and unit not in expected:
                yield f"{panel['title']}: unit {unit} for {expr}, expected one of {sorted(expected)}"


_UNITS = {
    "_bytes_total": "binBps",
    "_seconds_total": "percentunit",
    "_bytes": "bytes",
    "_seconds": "s",
    "_ratio": "percentunit",
}


def unit_of(expr: str) -> set[str] | None:
    names = names_in(expr)
    if "histogram_quantile" in expr or expr.count("_sum") == expr.count("_count") == 1:
        return {"s"} if any("_seconds_" in name for name in names) else {"short"}
    if len(names) != 1 or " / " in expr:
        return None
    (name,) = names
    return next(({unit} for suffix, unit in _UNITS.items() if name.endswith(suffix)), None)


def rates(board: dict[str, Any]) -> Iterator[str]:
    """Counters only under rate(), gauges never; no delta(), no mean of ratios, no fixed window."""
    for panel in panels(board):
        for expr in exprs(panel):
            yield from (f"{panel['title']}: {what} in {expr}" for what in bad_rates(expr))


def bad_rates(expr: str) -> Iterator[str]:
    if re.search(r"\b(delta|idelta|irate)\(", expr):
        yield "delta or irate"
    if re.search(r"\bavg\s*(by \([^)]*\)\s*)?\([^()]*\([^()]*\)[^()]*/", expr):
        yield "mean of ratios"
    if re.search(r"\[\d", expr):
        yield "fixed window"
    for name in names_in(expr):
        counted = SAMPLES[name].kind != "gauge" if name in SAMPLES else True
        if counted != bool(re.search(rf"rate\({name}\b", expr)):
            yield f"{'no rate of a counter' if counted else 'rate of a gauge'}: {name}"


def overlaps(board: dict[str, Any]) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        at = panel["gridPos"]
        if at["x"] + at["w"] > 24:
            yield f"{panel['title']}: beyond the right edge"
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                other = taken.setdefault((x, y), panel["title"])
                if other != panel["title"]:
                    yield f"{panel['title']} over {other} at {x}, {y}"


def identities(board: dict[str, Any]) -> Iterator[str]:
    ids = [panel["id"] for panel in board["panels"]]
    titles = [panel["title"] for panel in panels(board)]
    if len(set(ids)) != len(ids):
        yield "two panels with one id"
    yield from (f"two panels called {title}" for title in set(titles) if titles.count(title) > 1)
    yield from (f"{panel['title']}: no help" for panel in panels(board) if not panel.get("description"))


def sources(board: dict[str, Any]) -> Iterator[str]:
    for panel in panels(board):
        if panel["datasource"] != {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}:
            yield f"{panel['title']}: data source {panel['datasource']}"


LINTS = (
    unknown_metrics,
    unknown_labels,
    missing_model,
    units_against_names,
    rates,
    overlaps,
    identities,
    sources,
)
