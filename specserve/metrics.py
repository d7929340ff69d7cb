"""Every metric that specserve exports, in two tables, and the two objects that record them.

Names follow the field's usual ones under the prefix `specserve_`, units are in the names, all times are seconds. No
label ever carries anything that a client sent: values outside a label's list are counted as "other".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specserve.types import PoolLevels, RequestStats, RoundStats

OTHER = "other"

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_TOKEN_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.8, 1, 2, 4, 8),
)
_ROUND_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2)


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `labels` maps each label to its values from the start; `buckets` are upper bounds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"specserve_{name}_total", "counter", text, labels)


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"specserve_{name}", "gauge", text, labels)


def _histogram(name: str, buckets: tuple[float, ...], text: str) -> Metric:
    return Metric(f"specserve_{name}", "histogram", text, buckets=buckets)


_ROLES = ("draft", "target")
_WASTED = ("rejected", "stale", "cancelled", "stop", OTHER)
_DROPPED = (
    *("stale_push", "late_push", "failed_plan", "stale_verdict", "late_verdict"),
    *("old_life", "protocol", "draft_wait", OTHER),
)
_REJECTED = ("queue_full", "unavailable", "invalid_request", "invalid_value", "context_length_exceeded", OTHER)
_FINISHED = ("stop", "length", "abort", "error", OTHER)

ENGINE_METRICS = (
    _counter("prompt_tokens", "Prompt tokens of requests that ended."),
    _counter("generation_tokens", "Tokens committed to answers."),
    _counter("prefill_tokens", "Prompt positions that the target filled; refills after a loss count again."),
    _counter("spec_decode_num_drafts", "Chains offered to the target."),
    _counter("spec_decode_num_draft_tokens", "Drafted tokens offered to the target."),
    _counter("spec_decode_num_accepted_tokens", "Drafted tokens that were kept."),
    _counter("spec_decode_num_draft_tokens_per_pos", "Drafted tokens offered, by place in the chain.", position=()),
    _counter("spec_decode_num_accepted_tokens_per_pos", "Drafted tokens kept, by place in the chain.", position=()),
    _counter(
        "spec_decode_emitted_tokens",
        "Tokens committed to answers, by where they came from.",
        kind=("accepted", "bonus", "correction", "plain"),
    ),
    _counter("spec_decode_wasted_draft_tokens", "Drafted tokens that came to nothing.", reason=_WASTED),
    _counter("dropped_messages", "Messages of workers that could not change anything any more.", reason=_DROPPED),
    _histogram("round_seconds", _ROUND_S, "Wall time of a round."),
    _counter("worker_busy_seconds", "Time that workers computed.", phase=("draft", "verify", "sampling")),
    _histogram("time_to_first_token_seconds", _FIRST_TOKEN_S, "From arrival to the first token."),
    _histogram("e2e_request_latency_seconds", _REQUEST_S, "From arrival to the last token."),
    _histogram("request_queue_time_seconds", _REQUEST_S, "From arrival to a place in the rounds."),
    _histogram("request_time_per_output_token_seconds", _TOKEN_S, "Mean time per token after the first one."),
    _gauge("num_requests_running", "Requests that take part in rounds."),
    _gauge("num_requests_waiting", "Requests that wait for a place."),
    _gauge("slots", "Draft slots.", state=("held", "free")),
    _gauge("kv_blocks", "KV blocks.", role=_ROLES, state=("held", "free")),
    _counter("preemptions", "Requests that lost their place and were refilled."),
    _counter("refills", "Requests whose state the verifier could not go on from, so that they were fed again."),
    _counter("request_success", "Requests that ended, by how.", finished_reason=_FINISHED),
    _counter("requests_rejected", "Requests that were not admitted.", reason=_REJECTED),
    _gauge("worker_up", "1 while the worker answers.", role=_ROLES),
    _gauge("rule_lossless", "Rules that requests may ask for: 1 lossless, 0 lossy.", rule=()),
)

KNOWN_PARAMS = (
    *("add_special_tokens", "cache_salt", "do_sample", "encoding_format", "mm_processor_kwargs", "priority"),
    *("request_id", "return_details", "session_id", "spaces_between_special_tokens", "verbosity", OTHER),
)

HTTP_METRICS = (
    _counter(
        "http_requests",
        "HTTP requests by route template, method and status; 499 is a client that went away.",
        route=(),
        method=(),
        code=(),
    ),
    _gauge("http_inflight_requests", "HTTP requests being answered."),
    _counter("client_disconnects", "Clients that went away before the end."),
    _counter("stream_errors", "Streams that ended in an error event."),
    _counter("unknown_params", "Request fields that were ignored because nobody here knows them.", param=KNOWN_PARAMS),
)


class _Board:
    """The metrics of one table in a registry of their own, with constant labels in front."""

    def __init__(self, table: Iterable[Metric], constant: Mapping[str, str]) -> None:
        self._registry = CollectorRegistry()
        self._constant = tuple(constant.values())
        self._table = {metric.name: metric for metric in table}
        self._families = {name: self._family(metric, tuple(constant)) for name, metric in self._table.items()}
        self._series: dict[tuple[str, ...], Any] = {}
        for name, metric in self._table.items():
            for values in product(*metric.labels.values()):
                self.series(name, *values)

    def series(self, name: str, *values: str) -> Any:
        """The counter, gauge or histogram for label values, made at 0 when it is new."""
        key = (name, *values)
        found = self._series.get(key)
        if found is None:
            family, labels = self._families[name], (*self._constant, *values)
            found = self._series[key] = family.labels(*labels) if labels else family
        return found

    def listed(self, name: str, value: str) -> Any:
        """The series of a one-label family; a value that is not in the table counts as "other"."""
        known = next(iter(self._table[name].labels.values()))
        return self.series(name, value if value in known else OTHER)

    def render(self) -> str:
        """Prometheus text format 0.0.4."""
        return generate_latest(_Plain(self._registry)).decode("utf-8")

    def _family(self, metric: Metric, constant: tuple[str, ...]) -> Any:
        labels = (*constant, *metric.labels)
        if metric.kind == "histogram":
            return Histogram(metric.name, metric.help, labels, registry=self._registry, buckets=metric.buckets)
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(metric.name, metric.help, labels, registry=self._registry)


class _Plain:
    """A registry without the `_created` series, which double the text and which nothing here reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Any]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class EngineMetrics:
    """What the coordinator counts. Every series carries `model_name`; `max_depth` positions exist from the start."""

    def __init__(self, model_name: str, max_depth: int = 0) -> None:
        self._board = _Board(ENGINE_METRICS, {"model_name": model_name})
        for position in range(max_depth):
            self._position(position, 0, 0)

    def round(self, stats: RoundStats) -> None:
        """Count one round. Its kept, correction, bonus and plain tokens are those that were committed."""
        add = self._add
        accepted = sum(stats.kept_at)
        chosen = {"bonus": stats.bonus, "correction": stats.correction, "plain": stats.plain}
        emitted = {"accepted": accepted, **chosen}
        for kind, count in emitted.items():
            add("specserve_spec_decode_emitted_tokens_total", count, kind)
        add("specserve_generation_tokens_total", sum(emitted.values()))
        add("specserve_prefill_tokens_total", stats.prefill_tokens)
        add("specserve_spec_decode_num_drafts_total", max(stats.drafted_at, default=0))
        add("specserve_spec_decode_num_draft_tokens_total", sum(stats.drafted_at))
        add("specserve_spec_decode_num_accepted_tokens_total", accepted)
        for position, drafted in enumerate(stats.drafted_at):
            self._position(position, drafted, stats.kept_at[position] if position < len(stats.kept_at) else 0)
        self._times(stats)

    def levels(self, levels: PoolLevels) -> None:
        """Set the gauges of queue, slots and blocks."""
        gauge = self._board.series
        gauge("specserve_num_requests_running").set(levels.running)
        gauge("specserve_num_requests_waiting").set(levels.waiting)
        gauge("specserve_slots", "held").set(levels.slots_held)
        gauge("specserve_slots", "free").set(levels.slots_capacity - levels.slots_held)
        pools = {
            "target": (levels.target_blocks_held, levels.target_blocks_capacity),
            "draft": (levels.draft_blocks_held, levels.draft_blocks_capacity),
        }
        for role, (held, capacity) in pools.items():
            gauge("specserve_kv_blocks", role, "held").set(held)
            gauge("specserve_kv_blocks", role, "free").set(capacity - held)

    def ended(self, reason: str, stats: RequestStats) -> None:
        """Count a request that ended. One that never yielded a token leaves the latencies alone."""
        self._board.listed("specserve_request_success_total", reason).inc()
        self._add("specserve_prompt_tokens_total", stats.prompt_tokens)
        if stats.generated_tokens == 0:
            return
        observe = self._observe
        observe("specserve_time_to_first_token_seconds", stats.first_token_s)
        observe("specserve_e2e_request_latency_seconds", stats.total_s)
        observe("specserve_request_queue_time_seconds", stats.queue_s)
        if stats.generated_tokens > 1:
            per_token = (stats.total_s - stats.first_token_s) / (stats.generated_tokens - 1)
            observe("specserve_request_time_per_output_token_seconds", per_token)

    def dropped(self, reason: str, count: int = 1) -> None:
        """Count messages of workers that were too late: stale_push, late_push, failed_plan, old_life, …"""
        self._board.listed("specserve_dropped_messages_total", reason).inc(count)

    def wasted(self, reason: str, tokens: int) -> None:
        """Count drafted tokens that came to nothing: rejected, stale, cancelled, stop."""
        self._board.listed("specserve_spec_decode_wasted_draft_tokens_total", reason).inc(tokens)

    def rejected(self, reason: str) -> None:
        """Count a request that was not admitted, under the `code` of its error."""
        self._board.listed("specserve_requests_rejected_total", reason).inc()

    def refilled(self, count: int) -> None:
        """Count requests that the verifier could not go on with."""
        self._add("specserve_refills_total", count)

    def preempted(self) -> None:
        """Count a request that lost its place."""
        self._add("specserve_preemptions_total", 1)

    def worker(self, role: Literal["draft", "target"], up: bool) -> None:
        """Say whether a worker answers."""
        self._board.series("specserve_worker_up", role).set(1 if up else 0)

    def rules(self, lossless: Mapping[str, bool]) -> None:
        """Say which rules there are, and whether each is lossless."""
        for rule, exact in lossless.items():
            self._board.series("specserve_rule_lossless", rule).set(1 if exact else 0)

    def render(self) -> str:
        """Prometheus text format 0.0.4."""
        return self._board.render()

    def _times(self, stats: RoundStats) -> None:
        self._observe("specserve_round_seconds", stats.wall_s)
        self._add("specserve_worker_busy_seconds_total", stats.draft_busy_s, "draft")
        self._add("specserve_worker_busy_seconds_total", stats.forward_s, "verify")
        self._add("specserve_worker_busy_seconds_total", stats.sampling_s, "sampling")

    def _position(self, position: int, drafted: int, kept: int) -> None:
        self._add("specserve_spec_decode_num_draft_tokens_per_pos_total", drafted, str(position))
        self._add("specserve_spec_decode_num_accepted_tokens_per_pos_total", kept, str(position))

    def _add(self, name: str, amount: float, *values: str) -> None:
        self._board.series(name, *values).inc(amount)

    def _observe(self, name: str, seconds: float) -> None:
        self._board.series(name).observe(seconds)


class HttpMetrics:
    """What one HTTP process counts. `routes` are the (template, method) pairs that exist from the start."""

    def __init__(self, routes: Iterable[tuple[str, str]] = ()) -> None:
        self._board = _Board(HTTP_METRICS, {})
        self._routes = frozenset(routes)
        for route, method in self._routes:
            self._board.series("specserve_http_requests_total", route, method, "200")

    def started(self) -> None:
        """Count a request that is being answered."""
        self._board.series("specserve_http_inflight_requests").inc()

    def ended(self, route: str, method: str, code: int) -> None:
        """Count an answered request under its route template; unknown routes and methods count as "other"."""
        self._board.series("specserve_http_inflight_requests").dec()
        templates = {template for template, _ in self._routes}
        place = route if route in templates else OTHER
        verb = method if method in {"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"} else OTHER
        self._board.series("specserve_http_requests_total", place, verb, str(code)).inc()

    def disconnected(self) -> None:
        """Count a client that went away before its answer was complete."""
        self._board.series("specserve_client_disconnects_total").inc()

    def stream_failed(self) -> None:
        """Count a stream that ended in an error event."""
        self._board.series("specserve_stream_errors_total").inc()

    def unknown_param(self, name: str) -> None:
        """Count an ignored request field; names outside the fixed list count as "other"."""
        self._board.listed("specserve_unknown_params_total", name).inc()

    def render(self) -> str:
        """Prometheus text format 0.0.4."""
        return self._board.render()
