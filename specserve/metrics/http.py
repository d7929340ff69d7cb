"""What one HTTP process counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from specserve.metrics.board import Board, Snapshot
from specserve.metrics.table import HTTP_METRICS, KNOWN_PARAMS, OTHER

_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class HttpMetrics:
    """`routes` are the (template, method) pairs that exist from the start."""

    def __init__(self, routes: Iterable[tuple[str, str]] = ()) -> None:
        self._board = Board(HTTP_METRICS, {})
        self._routes = frozenset(routes)
        for route, method in self._routes:
            self._board.counter("specserve_http_requests_total", route, method, "200")

    def started(self) -> None:
        """Count a request that is being answered."""
        self._board.gauge("specserve_http_inflight_requests").inc()

    def ended(self, route: str, method: str, code: int) -> None:
        """Count an answered request under its route template; unknown routes and methods count as "other"."""
        self._board.gauge("specserve_http_inflight_requests").inc(-1)
        templates = {template for template, _ in self._routes}
        place = route if route in templates else OTHER
        verb = method if method in _METHODS else OTHER
        self._board.counter("specserve_http_requests_total", place, verb, str(code)).inc()

    def disconnected(self, stage: str) -> None:
        """Count a client that went away before its answer was complete: at its body, waiting, or at the answer."""
        self._board.counter("specserve_client_disconnects_total", stage).inc()

    def rejected(self, code: str) -> None:
        """Count a request that was refused before its answer began, under the `code` of its error."""
        self._board.listed("specserve_http_requests_rejected_total", code).inc()

    def stream_failed(self) -> None:
        """Count a stream that ended in an error event."""
        self._board.counter("specserve_stream_errors_total").inc()

    def unknown_params(self, names: Iterable[str]) -> None:
        """Count the ignored fields of a request; names outside the fixed list count as "other"."""
        counted = Counter(name if name in KNOWN_PARAMS else OTHER for name in names)
        for name, times in counted.items():
            self._board.counter("specserve_unknown_params_total", name).inc(times)

    def snapshot(self) -> Snapshot:
        """Every sample as it stands."""
        return self._board.snapshot()

    def render(self) -> str:
        """Prometheus text format 0.0.4 of this process alone."""
        return self._board.render()
