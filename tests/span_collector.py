"""A real OTLP collector over HTTP, in this process: it decodes what exporters send and keeps it."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_STATUS_ERROR = 2


@dataclass(frozen=True)
class Seen:
    """One span. Ids are lower-case hexadecimal, times nanoseconds since the epoch."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    began: int
    ended: int
    failed: bool
    process: str
    attributes: dict[str, Any] = field(hash=False)


class Collector:
    """What was received so far."""

    def __init__(self) -> None:
        self.url = ""
        self._spans: list[Seen] = []
        self._lock = threading.Lock()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for group in request.resource_spans:
                process = _plain(group.resource.attributes)["service.instance.id"]
                self._spans += [_seen(span, process) for scope in group.scope_spans for span in scope.spans]

    @property
    def spans(self) -> list[Seen]:
        """In order of beginning."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.began, span.ended))

    def of(self, trace: str) -> list[Seen]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace == trace]

    def until(self, seen: Callable[[], bool], seconds: float = 30) -> None:
        """Wait until what is expected has come; exporters send once a second."""
        deadline = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < deadline, [(span.name, span.trace) for span in self.spans]
            time.sleep(0.02)


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


def _seen(span: Any, process: str) -> Seen:
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    failed = span.status.code == _STATUS_ERROR
    times = (span.start_time_unix_nano, span.end_time_unix_nano)
    return Seen(span.name, *ids, span.kind, *times, failed, process, _plain(span.attributes))


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on loopback; `url` is where exporters send to."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
