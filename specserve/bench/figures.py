"""The pictures of docs/exactness.md, from the rows of benches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.bench.report import Row
from specserve.bench.svg import BLUE, GREEN, INK, ORANGE, RED, VIOLET, Axis, Curve, Line, curves, dot_lines, scatter
from specserve.errors import ConfigError

if TYPE_CHECKING:
    from specserve.bench.expectations import Expectation

_LEAST = 1e-12


def p_values(rows: Sequence[Row]) -> str:
    """p-values by rule and by what is broken, on a logarithmic axis that ends at 10⁻¹²."""
    lines = _by_rule(rows, lambda row: [(_number(row["p_value"]), _colour(row))])
    axis = Axis("p-value of what came out, against the target's law", _LEAST, 1, [1e-12, 1e-9, 1e-6, 1e-3, 1], True)
    return dot_lines(
        f"Chi-square over at least {_tokens(rows):,} tokens each",
        axis,
        lines,
        [(BLUE, "as served, plain and under top-p"), (RED, "broken on purpose; left edge: 10⁻¹² or less")],
    )


def distances(rows: Sequence[Row]) -> str:
    """Total variation distance of what came out from the target's law, beside what chance alone makes of it."""
    return dot_lines(
        f"Distance from the target's law of at least {_tokens(rows):,} tokens each",
        Axis("total variation distance", 1e-3, 1, [1e-3, 1e-2, 1e-1, 1], True),
        _by_rule(rows, lambda row: [(_number(row["by_chance"]), INK), (_number(row["distance"]), _colour(row))]),
        [(INK, "expected of exact draws"), (BLUE, "as served, plain and under top-p"), (RED, "broken on purpose")],
    )


def _by_rule(rows: Sequence[Row], dots: Callable[[Row], list[tuple[float, str]]]) -> list[Line]:
    """A line for each rule and what is broken around it."""
    lines: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        label = f"{row['rule']}: {row['broken']}" if row["broken"] else str(row["rule"])
        lines.setdefault(label, []).extend(dots(row))
    return [Line(label, found) for label, found in lines.items()]


def _colour(row: Row) -> str:
    return RED if row["broken"] else BLUE


def _number(value: str | float | None) -> float:
    return float(value or 0)


def _tokens(rows: Sequence[Row]) -> int:
    return min(int(row["tokens"] or 0) for row in rows)


def temperatures(rows: Sequence[Row]) -> str:
    """The share of drafted tokens that each rule keeps, by temperature: a line for each rule."""
    colours = {"block": GREEN, "rejection": BLUE, "coupled": VIOLET, "exact": ORANGE, "typical": RED}
    return curves(
        "Drafted tokens kept, by exact expectation over pairs of models",
        Axis("temperature", 0, 2, [0, 0.5, 1, 1.5, 2]),
        Axis("share kept", 0, 1, [0, 0.25, 0.5, 0.75, 1]),
        [
            Curve([(_number(row["temperature"]), _number(row[rule])) for row in rows], colour)
            for rule, colour in colours.items()
        ],
        [(colour, f"{rule} (lossy)" if rule == "typical" else rule) for rule, colour in colours.items()],
    )


def kept_tokens(pairs: Sequence[Expectation]) -> str:
    """What `block` keeps more than `rejection`: a dot for each pair of models."""
    colours = {1: BLUE, 2: ORANGE, 3: GREEN}
    return scatter(
        f"What block keeps more than rejection, {len(pairs)} random pairs of models",
        Axis("drafted tokens kept by rejection, on average", 0, 2, [0, 0.5, 1, 1.5, 2]),
        Axis("more by block", -0.05, 0.3, [0, 0.1, 0.2, 0.3]),
        [(pair.rejection, pair.block - pair.rejection, colours[pair.depth]) for pair in pairs],
        [(colour, f"depth {depth}") for depth, colour in colours.items()],
    )


def acceptance(path: Path) -> str:
    """First drafted tokens kept, by temperature and rule. Raises ConfigError for a file that holds no such rows."""
    report = _read(path)
    rows = report["rows"]
    colours = {"yes": BLUE, "NO": RED}
    lines = [
        Line(f"{row['rule']}, temperature {row['temperature']:g}", [(row["first_position"], colours[row["lossless"]])])
        for row in rows
        if row["temperature"] > 0
    ]
    greedy = sorted({row["first_position"] for row in rows if row["temperature"] == 0})
    lines = [Line("all rules, temperature 0", [(value, BLUE) for value in greedy])] * bool(greedy) + lines
    tenths = int(max(row["first_position"] for row in rows) * 10) + 1
    axis = Axis("share of first drafted tokens kept", 0, tenths / 10, [tenth / 10 for tenth in range(tenths + 1)])
    return dot_lines("Acceptance on the configured pair", axis, lines, [(BLUE, "lossless"), (RED, "lossy")])


def _read(path: Path) -> Any:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--acceptance takes a file that `bench acceptance --json` wrote; {path}: {error}") from None
    if not isinstance(report, dict) or not all("first_position" in row for row in report.get("rows", [{}])):
        raise ConfigError(f"--acceptance takes a file that `bench acceptance --json` wrote; {path} is another one")
    return report
