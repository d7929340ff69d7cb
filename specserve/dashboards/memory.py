"""What is held, and what travels."""

from __future__ import annotations

from specserve.dashboards.panels import Board, Panel, Query, Row, quantile, ratio, series, summed

_PLANNED = series("memory_bytes", 'use!="free"')

BOARD = Board(
    "specserve-memory",
    "specserve: memory and network",
    "KV blocks and weights; bytes, messages and transfer times.",
    (
        Row(
            "Memory",
            (
                Panel(
                    "KV in use",
                    "lines",
                    "ratio",
                    (Query(f"max by (role) ({series('kv_cache_usage_ratio')})", "{{role}}"),),
                    "Held share of the blocks; near 1, requests are preempted.",
                ),
                Panel(
                    "KV blocks",
                    "stacked",
                    "count",
                    (Query(f"sum by (role, state) ({series('kv_blocks')})", "{{role}} {{state}}"),),
                    "Blocks of each model by state.",
                ),
                Panel(
                    "Planned memory",
                    "stacked",
                    "bytes",
                    (Query(f"sum by (role, use) ({_PLANNED})", "{{role}} {{use}}"),),
                    "What each worker planned to hold on its device when it started.",
                ),
                Panel(
                    "Models",
                    "number",
                    "bytes",
                    (Query(f"sum by (role) ({series('model_weights_bytes')})", "{{role}}"),),
                    "Bytes of weights.",
                    width=4,
                ),
                Panel(
                    "Loading",
                    "number",
                    "seconds",
                    (Query(f"max by (role) ({series('model_load_seconds')})", "{{role}}"),),
                    "How long the last loading took.",
                    width=4,
                ),
                Panel(
                    "Blocks in all",
                    "number",
                    "count",
                    (Query(f"sum by (role) ({series('kv_blocks_capacity')})", "{{role}}"),),
                    "KV blocks that each worker has.",
                    width=8,
                    height=5,
                ),
            ),
        ),
        Row(
            "Prefix cache",
            (
                Panel(
                    "Found in the cache",
                    "lines",
                    "ratio",
                    (
                        Query(
                            ratio(
                                summed("prefix_cache_hits_total", by="role"),
                                summed("prefix_cache_queries_total", by="role"),
                            ),
                            "{{role}}",
                        ),
                    ),
                    "Share of the tokens of requests that began whose KV was there already.",
                ),
                Panel(
                    "Tokens not fed",
                    "lines",
                    "tokens/s",
                    (Query(summed("prefix_cache_hits_total", by="role"), "{{role}}"),),
                    "Tokens that were taken from the cache.",
                ),
                Panel(
                    "Evictions",
                    "lines",
                    "per second",
                    (Query(summed("prefix_cache_evictions_total", by="role"), "{{role}}"),),
                    "Cached blocks whose room was needed; many beside few hits: more KV memory would help.",
                ),
            ),
        ),
        Row(
            "Network",
            (
                Panel(
                    "Bytes by link",
                    "lines",
                    "bytes/s",
                    (Query(summed("network_bytes_total", by="link"), "{{link}}"),),
                    "Between the coordinator and the others.",
                ),
                Panel(
                    "Bytes by kind",
                    "stacked",
                    "bytes/s",
                    (Query(summed("network_bytes_total", by="kind"), "{{kind}}"),),
                    "push and verify carry the dists of drafted tokens.",
                ),
                Panel(
                    "Bytes per accepted token",
                    "lines",
                    "bytes",
                    (
                        Query(
                            ratio(
                                summed("network_bytes_total", 'link=~".*draft|.*target"'),
                                summed("spec_decode_num_accepted_tokens_total"),
                            ),
                            "to and from both workers",
                        ),
                    ),
                    "What speculation across machines costs the network.",
                ),
                Panel(
                    "Messages",
                    "lines",
                    "per second",
                    (Query(summed("network_messages_total", by="link"), "{{link}}"),),
                    "Heartbeats included.",
                ),
                Panel(
                    "Round trip without computing",
                    "lines",
                    "seconds",
                    tuple(
                        Query(quantile(q, "network_transfer_seconds", by="role"), f"{{{{role}}}} p{100 * q:g}")
                        for q in (0.5, 0.99)
                    ),
                    "Wire, queues and unpacking: what a worker's answer takes beyond its computing.",
                ),
                Panel(
                    "Packing",
                    "lines",
                    "ratio",
                    (Query(summed("serialization_seconds_total", by="link"), "{{link}}"),),
                    "Share of the coordinator's time that goes into packing and unpacking.",
                ),
            ),
        ),
    ),
)
