"""Spans of requests, for operators who trace (OpenTelemetry). Off by default, and then nothing here is ever called.

`traceparent` is the header of W3C Trace Context: it says to which span of which trace others belong. All times are
seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from specserve.config import TracingConfig
from specserve.errors import ConfigError

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


class Span(Protocol):
    """A part of a request's life that has begun."""

    @property
    def traceparent(self) -> str:
        """What a span inside this one names as its parent, here or in another process."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Add to what is known of it."""
        ...

    def end(self, at_s: float | None = None, *, failed: bool = False) -> None:
        """It is over, now unless said otherwise. Call once."""
        ...


class Tracer(Protocol):
    """Takes spans and sends them on in the background. Safe to use from any thread."""

    def start(
        self,
        name: str,
        parent: Mapping[str, str],
        attributes: Attributes,
        *,
        kind: Literal["server", "internal"] = "internal",
        at_s: float | None = None,
    ) -> Span | None:
        """Begin a span, now unless said otherwise; None where this trace is not to be recorded.

        parent holds `traceparent` and `tracestate` as headers do; without a valid one a new trace begins.
        """
        ...

    def record(self, name: str, traceparent: str, began_s: float, ended_s: float, attributes: Attributes) -> None:
        """A span that is over already."""
        ...

    def close(self) -> None:
        """Send what waits. Idempotent."""
        ...


def tracer_of(config: TracingConfig, part: str) -> Tracer | None:
    """The tracer of this process, which plays `part` (ingress, coordinator, …); None where nobody traces.

    Raises ConfigError when the packages are missing, or the file cannot be written.
    """
    if config.exporter == "none":
        return None
    try:
        from specserve.tracing.opentelemetry import OpenTelemetry

        return OpenTelemetry(config, part)
    except ImportError as error:
        raise ConfigError(
            f"observe.tracing.exporter {config.exporter} needs OpenTelemetry ({error}): "
            f"pip install specserve[tracing], or set it to none"
        ) from None


def check(config: TracingConfig) -> None:
    """Raise ConfigError where `tracer_of` would."""
    tracer = tracer_of(config, "check")
    if tracer is not None:
        tracer.close()
