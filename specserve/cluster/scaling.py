"""How many pipelines Serve shall run. The load is what the engines say, not the calls that Serve sees."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

LOAD = "load"
"""What a pipeline reports: its running and waiting sequences."""


def by_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """As many pipelines as keep each at its target load. Serve applies bounds and delays."""
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    if not loads:
        return context.target_num_replicas, {}
    return sum(loads.values()) / context.config.target_ongoing_requests, {}
