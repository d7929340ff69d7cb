"""Every metric that specserve exports, in three tables.

Names follow the field's usual ones under the prefix `specserve_`, units are in the names, all times are seconds. No
label ever carries anything that a client sent: values outside a label's list are counted as "other". All series exist
from the start at 0, so that ratios have no gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, get_args

from specserve.types import LostBy

OTHER = "other"

# Buckets of latencies, first tokens and token gaps are those that dashboards of other servers use, so that quantiles
# can be laid side by side.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_TOKEN_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.8, 1, 2, 4, 8),
)
_STEP_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2)
_WIRE_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_POSITIONS = tuple(float(2**k) for k in range(15))
_LENGTHS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_KEPT = tuple(float(n) for n in (*range(9), 12, 16, 24, 32, 48, 64))


@dataclass(frozen=True, slots=True)
class Metric:
    """One family.

    `labels` maps each label to its values from the start, all combinations of them unless `combinations` lists
    those that exist; `buckets` are upper bounds.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    combinations: tuple[tuple[str, ...], ...] | None = None

    @property
    def from_the_start(self) -> tuple[tuple[str, ...], ...]:
        """The label values of the series that exist before anything happened."""
        return tuple(product(*self.labels.values())) if self.combinations is None else self.combinations

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names of its samples in the text format."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"specserve_{name}_total", "counter", text, labels)


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"specserve_{name}", "gauge", text, labels)


def _histogram(name: str, buckets: tuple[float, ...], text: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"specserve_{name}", "histogram", text, labels, buckets)


ROLES = ("draft", "target")
BUSY_PHASES = {"draft": ("draft",), "target": ("forward", "sampling")}
STEP_RESULTS = ("in_time", "late", "refused")
WAITS = ("peer", "wire", "coordinator", "idle", "away")
"""peer: the other worker; wire: a message under way; coordinator: its turn; idle: no request; away: no worker."""
LOST_BY = get_args(LostBy)
MEMORY_USES = ("weights", "kv", "logits", "slots", "graphs", "free")
"""free: what the device had beside the weights before the rest was allocated."""
SLOT_STATES = ("free", "drafting", "drafted", "verifying")
SLOS = ("ttft", "tpot", "e2e", "all")
FALLBACKS = ("draft_down", "draft_slow", "no_draft", "load", "request")
"""load: the depth policy saw no gain in drafting; request: it wanted no drafts, or had no room for any."""
SOURCES = ("small_model", "eagle", "mtp", "ngram", "suffix", "prediction", OTHER)
CANCELLED_AT = ("queued", "prefill", "decode")
GONE_AT = ("body", "waiting", "answer")
"""body: it had not sent all of it; waiting: no token had come from the engine; answer: some had."""
MESSAGE_KINDS = (
    *("open", "close", "plan", "push", "planahead", "pushahead", "verify", "verdict"),
    *("submit", "cancel", "deltas", "reconnect", "beat", OTHER),
)
LINKS = ("to_draft", "from_draft", "to_target", "from_target", "to_ingress", "from_ingress")
_WASTED = ("rejected", "stale", "cancelled", "stop", "unlikely", OTHER)
_DROPPED = (
    *("stale_push", "late_push", "failed_plan", "stale_verdict", "late_verdict"),
    *("old_life", "protocol", "draft_wait", OTHER),
)
_REJECTED = ("queue_full", "unavailable", "invalid_request", "invalid_value", "context_length_exceeded", OTHER)
_HTTP_REJECTED = (
    *("invalid_request", "invalid_value", "unsupported_parameter", "context_length_exceeded", "model_not_found"),
    *("route_not_found", "method_not_allowed", "invalid_api_key", "permission_denied", "body_too_large"),
    *("headers_too_large", "unsupported_media_type", "deadline_exceeded", "queue_full", "rate_limit_exceeded"),
    *("unavailable", OTHER),
)
_FINISHED = ("stop", "length", "abort", "error", OTHER)

ENGINE_METRICS = (
    # what clients feel
    _counter("prompt_tokens", "Prompt tokens of requests that ended."),
    _counter("prompt_tokens_cached", "Prompt tokens of these that were in the prefix cache when they first began."),
    _counter("generation_tokens", "Tokens committed to answers."),
    _counter("request_success", "Requests that ended, by how.", finished_reason=_FINISHED),
    _counter("requests_rejected", "Requests that were not admitted.", reason=_REJECTED),
    _counter("requests_cancelled", "Requests given up by who asked for them, by where they were.", stage=CANCELLED_AT),
    _counter("requests_resumed", "Requests that went on after their coordinator, or the way to it, was lost."),
    _counter("request_slo", "Ended requests by whether they met what was promised.", slo=SLOS, met=("true", "false")),
    _gauge("num_requests_running", "Requests that take part in rounds."),
    _gauge("num_requests_waiting", "Requests that wait for a place."),
    _histogram("time_to_first_token_seconds", _FIRST_TOKEN_S, "From arrival to the first token."),
    _histogram("inter_token_latency_seconds", _TOKEN_S, "Per token: the gap before its round, shared by its tokens."),
    _histogram("step_interval_seconds", _TOKEN_S, "Gap between two rounds that brought a request tokens."),
    _histogram("request_time_per_output_token_seconds", _TOKEN_S, "Mean time per token after the first one."),
    _histogram("e2e_request_latency_seconds", _REQUEST_S, "From arrival to the last token."),
    _histogram("request_queue_time_seconds", _REQUEST_S, "From arrival to a place in the rounds."),
    _histogram("request_prefill_time_seconds", _REQUEST_S, "From a place in the rounds to the first token."),
    _histogram("request_decode_time_seconds", _REQUEST_S, "From the first token to the last one."),
    _histogram("request_prompt_tokens", _LENGTHS, "Prompt tokens of a request."),
    _histogram("request_generation_tokens", _LENGTHS, "Tokens of an answer."),
    # speculation
    _counter("spec_decode_num_drafts", "Chains offered to the target."),
    _counter("spec_decode_num_draft_tokens", "Drafted tokens offered to the target."),
    _counter("spec_decode_num_accepted_tokens", "Drafted tokens that were kept."),
    _counter(
        "spec_decode_source_draft_tokens",
        "Drafted tokens offered, and of these kept, by the speculator that made them.",
        source=SOURCES,
        result=("offered", "kept"),
    ),
    _counter("spec_decode_num_draft_tokens_per_pos", "Drafted tokens offered, by place in the chain.", position=()),
    _counter("spec_decode_num_accepted_tokens_per_pos", "Drafted tokens kept, by place in the chain.", position=()),
    _counter(
        "spec_decode_emitted_tokens",
        "Tokens committed to answers, by where they came from.",
        kind=("accepted", "bonus", "correction", "plain"),
    ),
    _counter("spec_decode_wasted_draft_tokens", "Drafted tokens that came to nothing.", reason=_WASTED),
    _counter("spec_decode_fallback", "Decode rows that ran without a draft.", reason=FALLBACKS),
    _counter(
        "spec_decode_outcomes",
        "Verified rows by whether the outcome that came had been drafted ahead; none: nothing was drafted ahead.",
        result=("hit", "miss", "none"),
    ),
    _counter("spec_decode_outcomes_drafted", "Outcomes of verifications in flight that were drafted ahead."),
    _histogram("spec_decode_accepted_length", _KEPT, "Drafted tokens kept of one offered chain."),
    _gauge("spec_decode_draft_length", "Mean length of the chains offered in the last round that had any."),
    _gauge("rule_lossless", "Rules that requests may ask for: 1 lossless, 0 lossy.", rule=()),
    # the pipeline
    _counter("prefill_tokens", "Prompt positions that the target filled; refills after a loss count again."),
    _counter("recomputed_tokens", "Positions that the target computed again: it had them before, and lost them."),
    _histogram("round_seconds", _STEP_S, "Wall time of a round."),
    _histogram("draft_step_seconds", _STEP_S, "Computing time of one plan of the draft worker."),
    _histogram("verify_step_seconds", _STEP_S, "Computing time of one round of the target."),
    _histogram("verify_batch_tokens", _POSITIONS, "Positions in one target forward."),
    _counter(
        "emulated_steps",
        "Results of emulated devices: told in time, late, or refused as their own computing took longer.",
        role=ROLES,
        result=STEP_RESULTS,
    ),
    Metric(
        "specserve_worker_busy_seconds_total",
        "counter",
        "Time that workers computed.",
        {"role": (), "phase": ()},
        combinations=tuple((role, phase) for role, phases in BUSY_PHASES.items() for phase in phases),
    ),
    _counter(
        "worker_wait_seconds", "Time that workers did not compute, by what they waited for.", role=ROLES, reason=WAITS
    ),
    _counter("overlap_seconds", "Time that draft and target computed at once."),
    _gauge("slots", "Draft slots: free, leased to a plan, holding a draft, or under verification.", state=SLOT_STATES),
    _gauge("slots_capacity", "Draft slots in all."),
    _histogram("slot_wait_seconds", _REQUEST_S, "Time that a request went without drafts because no slot was free."),
    _gauge("worker_up", "1 while the worker answers.", role=ROLES),
    _counter("worker_restarts", "Workers that came back, by why they had been lost.", role=ROLES, reason=LOST_BY),
    _gauge("model_load_seconds", "Time that loading took.", role=ROLES),
    _gauge("model_weights_bytes", "Bytes of weights.", role=ROLES),
    # memory and network
    _gauge("memory_bytes", "Bytes on the worker's device, by what they are for.", role=ROLES, use=MEMORY_USES),
    _gauge(
        "kv_blocks", "KV blocks; cached ones are had when free ones lack.", role=ROLES, state=("held", "cached", "free")
    ),
    _gauge("kv_blocks_capacity", "KV blocks in all.", role=ROLES),
    _gauge("kv_cache_usage_ratio", "Held share of the KV blocks.", role=ROLES),
    _counter("prefix_cache_queries", "Tokens of requests that were looked up as they began.", role=ROLES),
    _counter("prefix_cache_hits", "Tokens of these whose KV was there, and that were not fed.", role=ROLES),
    _counter("prefix_cache_evictions", "Cached KV blocks whose room was needed.", role=ROLES),
    _counter("preemptions", "Requests that lost their place and were refilled."),
    _counter("refills", "Requests whose state the verifier could not go on from, so that they were fed again."),
    _counter("dropped_messages", "Messages of workers that could not change anything any more.", reason=_DROPPED),
    _counter("network_bytes", "Bytes between the coordinator and others.", link=LINKS, kind=MESSAGE_KINDS),
    _counter("network_messages", "Messages between the coordinator and others.", link=LINKS, kind=MESSAGE_KINDS),
    _counter("serialization_seconds", "Time that the coordinator spent packing and unpacking.", link=LINKS),
    _histogram("network_transfer_seconds", _WIRE_S, "A worker's round trip less its computing.", role=ROLES),
    # what this is
    _gauge("build_info", "1, with the versions that run.", version=(), python=(), ray=()),
    _gauge(
        "config_info",
        "1, with what is configured.",
        target=(),
        draft=(),
        speculator=(),
        rule=(),
        transport=(),
        depth=(),
        depth_policy=(),
    ),
)

KNOWN_PARAMS = (
    *("add_special_tokens", "do_sample", "encoding_format", "mm_processor_kwargs", "priority"),
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
    _counter(
        "http_requests_rejected",
        "HTTP requests that were refused before their answer began, by the code of the error, whoever refused them.",
        reason=_HTTP_REJECTED,
    ),
    _counter("client_disconnects", "Clients that went away before the end, by how far they were.", stage=GONE_AT),
    _counter("stream_errors", "Streams that ended in an error event."),
    _counter("unknown_params", "Request fields that were ignored because nobody here knows them.", param=KNOWN_PARAMS),
)

LEDGER_METRICS = (_gauge("ingress_up", "HTTP processes that answer."),)
"""What only the place that merges all processes can tell."""

ALIASES = {
    "specserve_spec_decode_num_drafts_total": "vllm:spec_decode_num_drafts_total",
    "specserve_spec_decode_num_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "specserve_spec_decode_num_accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    "specserve_spec_decode_num_accepted_tokens_per_pos_total": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}
"""Names under which benchmark clients and boards of vLLM look for the same numbers (its metric names)."""
