"""What is counted, where, and how it is shown.

`table` names every metric; `board` keeps the series of one process; `engine` and `http` record; `ledger` merges the
processes of a deployment into one text whose counters never fall; `history` keeps the last five minutes.
"""

from specserve.metrics.board import Snapshot
from specserve.metrics.engine import EngineMetrics
from specserve.metrics.http import HttpMetrics
from specserve.metrics.ledger import Ledger
from specserve.metrics.table import ENGINE_METRICS, HTTP_METRICS, LEDGER_METRICS, OTHER, Metric

__all__ = [
    "ENGINE_METRICS",
    "HTTP_METRICS",
    "LEDGER_METRICS",
    "OTHER",
    "EngineMetrics",
    "HttpMetrics",
    "Ledger",
    "Metric",
    "Snapshot",
]
