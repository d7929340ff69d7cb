"""Who computes when, and what everybody waits for."""

from __future__ import annotations

from specserve.dashboards.panels import Board, Panel, Query, Row, quantiles, rate, ratio, series, summed

_TARGET_BUSY = summed("worker_busy_seconds_total", 'role="target"')

_HELD = series("slots", 'state!="free"')

BOARD = Board(
    "specserve-pipeline",
    "specserve: pipeline",
    "Utilisation of both workers, overlap, waits, slots and steps.",
    (
        Row(
            "Utilisation",
            (
                Panel(
                    "Computing",
                    "lines",
                    "ratio",
                    (Query(summed("worker_busy_seconds_total", by="role"), "{{role}}"),),
                    "Share of the time that a worker computes.",
                ),
                Panel(
                    "Overlap",
                    "lines",
                    "ratio",
                    (Query(ratio(summed("overlap_seconds_total"), _TARGET_BUSY), "draft while the target computes"),),
                    "Share of the target's computing time in which the draft computes as well.",
                ),
                Panel(
                    "Computing by phase",
                    "stacked",
                    "ratio",
                    (Query(summed("worker_busy_seconds_total", by="role, phase"), "{{role}} {{phase}}"),),
                    "Drafting; the target's forward; its sampling and verification.",
                ),
                Panel(
                    "The target's day",
                    "stacked",
                    "ratio",
                    (
                        Query(_TARGET_BUSY, "computing"),
                        Query(summed("worker_wait_seconds_total", 'role="target"', by="reason"), "{{reason}}"),
                    ),
                    "Computing, or waiting: for the draft (peer), wire, coordinator; idle; away. Sums to 1.",
                ),
                Panel(
                    "The draft's day",
                    "stacked",
                    "ratio",
                    (
                        Query(summed("worker_busy_seconds_total", 'role="draft"'), "computing"),
                        Query(summed("worker_wait_seconds_total", 'role="draft"', by="reason"), "{{reason}}"),
                    ),
                    "The same for the draft worker; peer is the target here.",
                ),
                Panel(
                    "Bubble",
                    "lines",
                    "ratio",
                    (
                        Query(
                            summed("worker_wait_seconds_total", 'reason!~"idle|away"', by="role"),
                            "{{role}} waits",
                        ),
                    ),
                    "Time that a worker could have computed but waited: 1 − computing − idle − away.",
                ),
            ),
        ),
        Row(
            "Steps",
            (
                Panel(
                    "Round",
                    "lines",
                    "seconds",
                    quantiles("round_seconds"),
                    "From the end of one to the end of the next.",
                ),
                Panel("Draft step", "lines", "seconds", quantiles("draft_step_seconds"), "Computing of one plan."),
                Panel("Verify step", "lines", "seconds", quantiles("verify_step_seconds"), "Computing of one round."),
                Panel(
                    "Positions in a forward",
                    "heatmap",
                    "tokens",
                    (Query(f"sum by (le) ({rate('verify_batch_tokens_bucket')})", "{{le}}"),),
                    "Feeds and chains of all rows.",
                ),
                Panel(
                    "Slots",
                    "stacked",
                    "count",
                    (Query(f"sum by (state) ({series('slots')})", "{{state}}"),),
                    "Leased to a plan, drafted, under verification, free. Sums to the capacity.",
                ),
                Panel(
                    "Slots in use",
                    "lines",
                    "ratio",
                    (
                        Query(
                            ratio(f"sum ({_HELD})", f"sum ({series('slots_capacity')})"),
                            "held",
                        ),
                    ),
                    "Near 1, plans shrink.",
                ),
                Panel(
                    "Waits for slots",
                    "lines",
                    "count",
                    (Query(summed("slot_wait_seconds_sum"), "requests without slots"),),
                    "Requests that go without drafts because no slot is free, on average: time waited per second.",
                ),
                Panel(
                    "Ended waits for slots",
                    "heatmap",
                    "seconds",
                    (Query(f"sum by (le) ({rate('slot_wait_seconds_bucket')})", "{{le}}"),),
                    "How long requests went without slots. Long ones: engine.slots is too small for this load.",
                ),
            ),
        ),
        Row(
            "Workers",
            (
                Panel(
                    "Restarts",
                    "lines",
                    "per second",
                    (Query(summed("worker_restarts_total", by="role, reason"), "{{role}}: {{reason}}"),),
                    "Workers that came back: gone or silent (lost), stuck in a batch (hung), or of no use any more.",
                ),
                Panel(
                    "Dropped messages",
                    "stacked",
                    "per second",
                    (Query(summed("dropped_messages_total", by="reason"), "{{reason}}"),),
                    "What workers sent too late to change anything.",
                ),
                Panel(
                    "Fed again",
                    "lines",
                    "per second",
                    (
                        Query(summed("preemptions_total"), "preempted"),
                        Query(summed("refills_total"), "refilled"),
                    ),
                    "Requests that lost their place or their state and were fed anew.",
                ),
                Panel(
                    "Computed again",
                    "lines",
                    "tokens/s",
                    (Query(summed("recomputed_tokens_total"), "by the target"),),
                    "What losses and preemptions cost: positions that the target had had, and computed once more.",
                ),
                Panel(
                    "Emulated steps",
                    "stacked",
                    "per second",
                    (Query(summed("emulated_steps_total", by="role,result"), "{{role}} {{result}}"),),
                    "Where many are late or refused, this machine is too slow for what it emulates.",
                ),
            ),
        ),
    ),
)
