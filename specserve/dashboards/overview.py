"""What clients feel, and whether anything is wrong."""

from __future__ import annotations

from specserve.dashboards.panels import Board, Panel, Query, Row, mean, quantiles, rate, ratio, series, summed

_HTTP = "rate(specserve_http_requests_total[$__rate_interval])"
_ACCEPTANCE = ratio(summed("spec_decode_num_accepted_tokens_total"), summed("spec_decode_num_draft_tokens_total"))


def _share_of_answers(code: str) -> str:
    """Of all answers; 0, not nothing, while there are answers but none like this."""
    these = f'sum (rate(specserve_http_requests_total{{code=~"{code}"}}[$__rate_interval]))'
    return f"({these} or 0 * sum ({_HTTP})) / (sum ({_HTTP}) > 0)"


BOARD = Board(
    "specserve-overview",
    "specserve: overview",
    "Requests, tokens, latencies and the state of the pipeline.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Tokens per second",
                    "number",
                    "tokens/s",
                    (Query(summed("generation_tokens_total")),),
                    "Tokens committed to answers.",
                    width=4,
                    height=5,
                ),
                Panel(
                    "Goodput",
                    "number",
                    "requests/s",
                    (Query(summed("request_slo_total", 'slo="all"', 'met="true"')),),
                    "Requests a second that met every promise: first token, time per token, whole answer.",
                    width=4,
                    height=5,
                ),
                Panel(
                    "Acceptance",
                    "number",
                    "ratio",
                    (Query(_ACCEPTANCE),),
                    "Drafted tokens that the target kept.",
                    width=4,
                    height=5,
                ),
                Panel(
                    "Workers up",
                    "number",
                    "count",
                    (Query(f"sum by (role) ({series('worker_up')})", "{{role}}"),),
                    "0 for the draft is plain decoding; 0 for the target is waiting.",
                    width=4,
                    height=5,
                ),
                Panel(
                    "HTTP processes",
                    "number",
                    "count",
                    (Query("sum (specserve_ingress_up)", "answering"),),
                    "Ingress replicas heard of lately.",
                    width=4,
                    height=5,
                ),
                Panel(
                    "Version",
                    "number",
                    "count",
                    (
                        Query(
                            f"sum by (version, python, ray) ({series('build_info')})",
                            "{{version}}, Python {{python}}, Ray {{ray}}",
                        ),
                    ),
                    "What runs.",
                    width=4,
                    height=5,
                ),
            ),
        ),
        Row(
            "Traffic",
            (
                Panel(
                    "Requests",
                    "stacked",
                    "requests/s",
                    (Query(f"sum by (route, code) ({_HTTP})", "{{route}} {{code}}"),),
                    "HTTP answers by route and status; 499 is a client that went away.",
                ),
                Panel(
                    "Errors",
                    "lines",
                    "ratio",
                    (
                        Query(_share_of_answers("5.."), "5xx"),
                        Query(_share_of_answers("4.."), "4xx"),
                    ),
                    "Share of answers that are errors, the client's and ours.",
                ),
                Panel(
                    "In the engine",
                    "lines",
                    "count",
                    (
                        Query(f"sum ({series('num_requests_running')})", "running"),
                        Query(f"sum ({series('num_requests_waiting')})", "waiting"),
                        Query("sum (specserve_http_inflight_requests)", "HTTP in flight"),
                    ),
                    "Requests that take part in rounds, and those that wait for a place.",
                ),
                Panel(
                    "Tokens",
                    "lines",
                    "tokens/s",
                    (
                        Query(summed("generation_tokens_total"), "generated"),
                        Query(summed("prefill_tokens_total"), "prefilled"),
                        Query(summed("prompt_tokens_total"), "prompts of ended requests"),
                        Query(summed("prompt_tokens_cached_total"), "found in the cache"),
                    ),
                    "What the target reads and writes.",
                ),
                Panel(
                    "How requests end",
                    "stacked",
                    "requests/s",
                    (Query(summed("request_success_total", by="finished_reason"), "{{finished_reason}}"),),
                    "abort is a client that left.",
                ),
                Panel(
                    "Refused and broken",
                    "lines",
                    "per second",
                    (
                        Query(summed("requests_rejected_total", by="reason"), "not admitted: {{reason}}"),
                        Query(summed("requests_resumed_total"), "resumed"),
                        Query("sum (rate(specserve_stream_errors_total[$__rate_interval]))", "broken streams"),
                        Query("sum (rate(specserve_unknown_params_total[$__rate_interval]))", "unknown fields"),
                    ),
                    "Requests that the engine did not admit, or took up after a loss; broken streams, unknown fields.",
                ),
                Panel(
                    "Refused at the door",
                    "stacked",
                    "requests/s",
                    (
                        Query(
                            "sum by (reason) (rate(specserve_http_requests_rejected_total[$__rate_interval]))",
                            "{{reason}}",
                        ),
                    ),
                    "HTTP requests that got an error instead of an answer, by the error's code, whoever refused them.",
                ),
                Panel(
                    "Clients that left",
                    "stacked",
                    "requests/s",
                    (
                        Query(
                            "sum by (stage) (rate(specserve_client_disconnects_total[$__rate_interval]))",
                            "gone: {{stage}}",
                        ),
                        Query(summed("requests_cancelled_total", by="stage"), "cancelled: {{stage}}"),
                    ),
                    "How far they were, as the HTTP side sees it, and where the engine was with what it gave up.",
                ),
            ),
        ),
        Row(
            "Latency",
            (
                Panel(
                    "Time to first token", "lines", "seconds", quantiles("time_to_first_token_seconds"), "From arrival."
                ),
                Panel(
                    "Time per output token",
                    "lines",
                    "seconds",
                    quantiles("request_time_per_output_token_seconds"),
                    "A request's mean after its first token: the honest figure, as tokens come in bursts.",
                ),
                Panel(
                    "Between tokens",
                    "lines",
                    "seconds",
                    quantiles("inter_token_latency_seconds"),
                    "The gap before a round, shared by its tokens.",
                ),
                Panel(
                    "Between rounds",
                    "lines",
                    "seconds",
                    quantiles("step_interval_seconds"),
                    "The raw gap between bursts: how smooth a stream looks.",
                ),
                Panel(
                    "Whole request",
                    "lines",
                    "seconds",
                    quantiles("e2e_request_latency_seconds"),
                    "Arrival to last token.",
                ),
                Panel(
                    "Where the time goes",
                    "stacked",
                    "seconds",
                    tuple(Query(mean(f"request_{part}_time_seconds"), part) for part in ("queue", "prefill", "decode")),
                    "Mean time of a request in each stage.",
                ),
                Panel(
                    "Promises kept",
                    "lines",
                    "ratio",
                    (
                        Query(
                            ratio(
                                summed("request_slo_total", 'met="true"', by="slo"),
                                summed("request_slo_total", by="slo"),
                            ),
                            "{{slo}}",
                        ),
                    ),
                    "Share of ended requests within each limit of observe.slo.",
                ),
                Panel(
                    "Prompt lengths",
                    "heatmap",
                    "tokens",
                    (Query(f"sum by (le) ({rate('request_prompt_tokens_bucket')})", "{{le}}"),),
                    "Prompt tokens of ended requests.",
                ),
                Panel(
                    "Answer lengths",
                    "heatmap",
                    "tokens",
                    (Query(f"sum by (le) ({rate('request_generation_tokens_bucket')})", "{{le}}"),),
                    "Tokens of ended answers.",
                ),
            ),
        ),
    ),
)
