"""All metrics once more among those that Ray exports on every node, for operators who scrape Ray already.

They arrive there as `ray_specserve_…`. Ray's own counters and histograms only take increments and observations, so
each sample of ours is mirrored as a gauge under its full name, `…_bucket`, `…_sum` and `…_total` included: `rate` and
`histogram_quantile` read those as they read the originals.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Gauge

from specserve.metrics.board import Series


class Mirror:
    """Sets one Ray gauge per sample name."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def show(self, values: Mapping[Series, float]) -> None:
        """Bring Ray's copy up to date."""
        for (name, labels), value in values.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = Gauge(name, tag_keys=tuple(key for key, _ in labels))
            gauge.set(value, tags=dict(labels))
