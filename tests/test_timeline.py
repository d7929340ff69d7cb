"""Rounds as a trace."""

from __future__ import annotations

import json

from specserve.timeline import chrome_trace
from specserve.types import DeviceSpan

SPANS = [
    DeviceSpan("draft", 1, sent_s=100.0, arrived_s=100.5, busy_s=0.3, rows=2, positions=8),
    DeviceSpan("target", 1, sent_s=100.2, arrived_s=101.2, busy_s=0.8, rows=2, positions=10),
]


def slices(trace: dict) -> dict[tuple[str, int], tuple[float, float]]:
    return {(e["name"], e["tid"]): (e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"}


def test_computing_lies_in_the_middle_of_the_round_trip():
    """Microseconds from the first message sent; overlapping work overlaps on the tracks."""
    found = slices(chrome_trace(SPANS, "m"))
    assert found[("plan 1", 3)] == (0.0, 500000.0)
    assert found[("plan 1", 1)] == (100000.0, 300000.0)
    assert found[("round 1", 4)] == (200000.0, 1000000.0)
    assert found[("round 1", 2)] == (300000.0, 800000.0)


def test_a_trace_is_json_with_named_tracks():
    """What viewers need, also when nothing has run yet."""
    for spans in (SPANS, []):
        trace = json.loads(json.dumps(chrome_trace(spans, "m")))
        names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
        assert {"specserve m", "draft computes", "target computes"} <= names
