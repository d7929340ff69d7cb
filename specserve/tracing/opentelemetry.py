"""The tracer on OpenTelemetry's SDK, with a provider of its own: what the process traces otherwise is left alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import specserve
from specserve.config import TracingConfig
from specserve.errors import ConfigError
from specserve.tracing import Attributes

_W3C = TraceContextTextMapPropagator()
_KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
_SEND_EVERY_MS = 1000
_WAITING_SPANS = 16384  # a round of 64 requests makes 128; what does not fit is dropped by the SDK, which says so


class OpenTelemetrySpan:
    """A `tracing.Span`."""

    def __init__(self, span: Any) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(span))
        self.traceparent = carrier["traceparent"]

    def set(self, attributes: Attributes) -> None:
        """See `tracing.Span`."""
        self._span.set_attributes(attributes)

    def end(self, at_s: float | None = None, *, failed: bool = False) -> None:
        """See `tracing.Span`."""
        if failed:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(_nanoseconds(at_s))


class OpenTelemetry:
    """A `tracing.Tracer`. A `traceparent` decides whether its trace is recorded, else a share of all traces is.

    The variables of OpenTelemetry's SDK hold beside the configuration: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
    and for the collector OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE and _TIMEOUT.
    """

    def __init__(self, config: TracingConfig, part: str) -> None:
        """Raises ConfigError when the file of spans cannot be written, ImportError without the collector's packages."""
        about = {"service.name": "specserve", "service.version": specserve.__version__}
        about["service.instance.id"] = f"{part}-{os.getpid()}"
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.share)),
            resource=Resource.create(about).merge(OTELResourceDetector().detect()),
        )
        processor = BatchSpanProcessor(
            _exporter(config), max_queue_size=_WAITING_SPANS, schedule_delay_millis=_SEND_EVERY_MS
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("specserve")
        self._closed = False

    def start(
        self,
        name: str,
        parent: Mapping[str, str],
        attributes: Attributes,
        *,
        kind: Literal["server", "internal"] = "internal",
        at_s: float | None = None,
    ) -> OpenTelemetrySpan | None:
        """See `tracing.Tracer`."""
        span = self._tracer.start_span(
            name, _W3C.extract(parent), _KINDS[kind], dict(attributes), start_time=_nanoseconds(at_s)
        )
        return OpenTelemetrySpan(span) if span.is_recording() else None

    def record(self, name: str, traceparent: str, began_s: float, ended_s: float, attributes: Attributes) -> None:
        """See `tracing.Tracer`."""
        parent = _W3C.extract({"traceparent": traceparent})
        span = self._tracer.start_span(name, parent, attributes=dict(attributes), start_time=_nanoseconds(began_s))
        span.end(_nanoseconds(ended_s))

    def close(self) -> None:
        """See `tracing.Tracer`."""
        if not self._closed:
            self._closed = True
            self._provider.shutdown()


def _exporter(config: TracingConfig) -> SpanExporter:
    if config.exporter == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=config.endpoint)
    if config.exporter == "console":
        return ConsoleSpanExporter(out=sys.stderr, formatter=_line)
    path = str(config.path)
    try:
        return ConsoleSpanExporter(out=open(path, "a", encoding="utf-8"), formatter=_line)
    except OSError as error:
        raise ConfigError(f"observe.tracing.path: cannot write {path}: {error.strerror or error}") from None


def _line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}\n"


def _nanoseconds(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s * 1e9)
