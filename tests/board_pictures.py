"""Draws a board from a Prometheus's real answers, for people without a Grafana. Not Grafana's own rendering."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COLOURS = (
    "#73bf69",
    "#5794f2",
    "#ff9830",
    "#f2495c",
    "#b877d9",
    "#fade2a",
    "#8ab8ff",
    "#96d98d",
    "#ffb357",
    "#ca95e5",
)
_CELL = 32  # pixels of one unit of the grid's height
_STYLE = """body{margin:0;overflow:hidden;background:#111217;color:#ccccdc;
  font:13px "DejaVu Sans",sans-serif;width:1440px}
h1{font-size:18px;font-weight:500;margin:12px 16px 2px}
p{margin:0 16px 8px;color:#8e8ea0}
#b{position:relative}
.p{position:absolute;background:#181b1f;border:1px solid #25282e;border-radius:3px;padding:6px 8px;
  box-sizing:border-box;overflow:hidden}
.p b{font-weight:500;display:block}
.r{position:absolute;padding:8px 16px;font-weight:500}
.l{font-size:10.5px;color:#9a9aac;line-height:1.35}
.l i{display:inline-block;width:9px;height:3px;margin-right:4px;vertical-align:middle}
.l span{margin-right:9px}
.n{font-size:22px;color:#73bf69;margin:4px 0}
.n small{font-size:11px;color:#9a9aac;display:block}
svg{display:block;width:100%}
text{fill:#8e8ea0;font-size:10px}"""

Fetch = Callable[[str], list[dict[str, Any]]]


def board_html(path: Path, fetch: Fetch) -> str:
    """A page with every panel of a board file; `fetch` answers a range query."""
    board = json.loads(path.read_text(encoding="utf-8"))
    bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
    parts = [_panel(panel, fetch) for panel in board["panels"]]
    note = "drawn by the project's own test renderer from real query results, not by Grafana"
    return (
        f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style><h1>{html.escape(board['title'])}</h1>"
        f"<p>{note}</p><div id=b style='height:{bottom * _CELL}px'>{''.join(parts)}</div>"
    )


def _panel(panel: dict[str, Any], fetch: Fetch) -> str:
    at = panel["gridPos"]
    place = (
        f"left:{at['x'] * 60 + 3}px;top:{at['y'] * _CELL}px;width:{at['w'] * 60 - 6}px;height:{at['h'] * _CELL - 6}px"
    )
    title = html.escape(panel["title"])
    if panel["type"] == "row":
        return f"<div class=r style='{place}'>{title}</div>"
    unit = panel["fieldConfig"]["defaults"]["unit"]
    lines = [line for target in panel["targets"] for line in _lines(target, fetch)]
    if panel["type"] in ("stat", "bargauge"):
        body = "".join(
            f"<div class=n>{_shown(values[-1][1], unit)}<small>{name}</small></div>" for name, values in lines[:4]
        )
    else:
        stacked = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
        body = _plot(lines, unit, at["h"] * _CELL - 82, stacked=stacked)
    return f"<div class=p style='{place}'><b>{title}</b>{body}</div>"


def _lines(target: dict[str, Any], fetch: Fetch) -> list[tuple[str, list[tuple[float, float]]]]:
    found = []
    for series in fetch(target["expr"]):
        legend = target.get("legendFormat", "")
        name = re.sub(r"{{(\w+)}}", lambda m, s=series: s["metric"].get(m[1], ""), legend) if legend != "__auto" else ""
        found.append((html.escape(name), [(float(t), float(v)) for t, v in series["values"]]))
    return found


def _plot(lines: list[tuple[str, list[tuple[float, float]]]], unit: str, height: int, *, stacked: bool) -> str:
    base: dict[float, float] = {}
    drawn = []
    for name, values in lines:
        points = [(t, v + (base.get(t, 0.0) if stacked else 0.0)) for t, v in values]
        base.update(points)
        drawn.append((name, points))
    top = max((v for _, points in drawn for _, v in points), default=0) or 1.0
    times = [t for _, points in drawn for t, _ in points]
    first, last = min(times, default=0), max(times, default=1)
    paths = []
    for index, (_, points) in reversed(list(enumerate(drawn))):
        colour = _COLOURS[index % len(_COLOURS)]
        xy = [f"{1000 * (t - first) / max(1, last - first):.0f},{100 - 96 * v / top:.1f}" for t, v in points]
        fill = f"<polygon points='0,100 {' '.join(xy)} 1000,100' fill='{colour}' opacity='.9'/>" if stacked else ""
        paths.append(
            f"{fill}<polyline points='{' '.join(xy)}' fill=none stroke='{colour}' stroke-width=1.5 "
            "vector-effect=non-scaling-stroke />"
        )
    svg = f"<svg viewBox='0 0 1000 100' preserveAspectRatio=none style='height:{height}px'>{''.join(paths)}</svg>"
    legend = "".join(
        f"<span><i style='background:{_COLOURS[i % len(_COLOURS)]}'></i>{name} {_shown(values[-1][1], unit)}</span>"
        for i, (name, values) in enumerate(lines[:12])
    )
    return f"<div class=l>{_shown(top, unit)}</div>{svg}<div class=l>{legend}</div>"


def _shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.1f}%"
    if unit == "s":
        return f"{1000 * value:.2f} ms" if abs(value) < 1 else f"{value:.2f} s"
    if unit in ("bytes", "binBps"):
        rest = "/s" if unit == "binBps" else ""
        for name, size in (("MiB", 2**20), ("KiB", 2**10)):
            if abs(value) >= size:
                return f"{value / size:.1f} {name}{rest}"
        return f"{value:.0f} B{rest}"
    return f"{value:.3g}" + (unit.removeprefix("suffix:") if unit.startswith("suffix:") else "")
