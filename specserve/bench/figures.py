"""The pictures of docs/exactness.md, from the rows of benches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.bench.report import Row
from specserve.bench.svg import BLUE, GREEN, ORANGE, RED, Axis, Line, dot_lines, scatter
from specserve.errors import ConfigError

if TYPE_CHECKING:
    from specserve.bench.exactness import Expectation

_LEAST = 1e-12


def p_values(rows: Sequence[Row]) -> str:
    """p-values by rule and by what is broken, on a logarithmic axis that ends at 10⁻¹²."""
    lines: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        label = f"{row['rule']}: {row['broken']}" if row["broken"] else str(row["rule"])
        lines.setdefault(label, []).append((float(row["p_value"] or 0), RED if row["broken"] else BLUE))
    axis = Axis("p-value of what came out, against the target's law", _LEAST, 1, [1e-12, 1e-9, 1e-6, 1e-3, 1], True)
    return dot_lines(
        f"Chi-square over at least {min(int(row['tokens'] or 0) for row in rows):,} tokens each",
        axis,
        [Line(label, dots) for label, dots in lines.items()],
        [(BLUE, "as served, plain and under top-p"), (RED, "broken on purpose; left edge: 10⁻¹² or less")],
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
