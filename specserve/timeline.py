"""Rounds on both devices as a timeline for trace viewers, in Chrome's trace event format (chrome://tracing, Perfetto).

Computing of draft and target lies on a track each, round trips as the coordinator sees them on two more: where the
tracks of the devices are full at the same time, they overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specserve.types import DeviceSpan

_TRACKS = {"draft": 1, "target": 2}
_TITLES = {1: "draft computes", 2: "target computes", 3: "draft round trip", 4: "target round trip"}
_VERBS = {"draft": "plan", "target": "round"}


def chrome_trace(spans: Sequence[DeviceSpan], name: str) -> dict[str, Any]:
    """The trace of these batches; times are microseconds from the first one sent."""
    zero_s = min((span.sent_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"specserve {name}"}}
    ]
    events += [
        {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": title}}
        for track, title in _TITLES.items()
    ]
    for span in spans:
        track = _TRACKS[span.role]
        events.append(_slice(span, track, span.began_s - zero_s, span.busy_s))
        events.append(_slice(span, track + 2, span.sent_s - zero_s, span.arrived_s - span.sent_s))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(span: DeviceSpan, track: int, began_s: float, length_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": track,
        "name": f"{_VERBS[span.role]} {span.number}",
        "cat": span.role,
        "ts": round(1e6 * began_s, 1),
        "dur": round(1e6 * length_s, 1),
        "args": {"rows": span.rows, "positions": span.positions},
    }
