"""Whether guessing pays: what is drafted, kept and wasted."""

from __future__ import annotations

from specserve.dashboards.panels import Board, Panel, Query, Row, rate, ratio, series, summed

_DRAFTED = summed("spec_decode_num_draft_tokens_total")
_ACCEPTED = summed("spec_decode_num_accepted_tokens_total")
_CHAINS = summed("spec_decode_num_drafts_total")
_OUTCOMES = "spec_decode_outcomes_total"
_SOURCES = "spec_decode_source_draft_tokens_total"
_SETTINGS = "speculator, rule, depth, depth_policy, transport, target, draft"

BOARD = Board(
    "specserve-speculation",
    "specserve: speculation",
    "What is drafted, kept and wasted, by place in the chain and by reason.",
    (
        Row(
            "Does it pay",
            (
                Panel(
                    "Acceptance",
                    "number",
                    "ratio",
                    (Query(ratio(_ACCEPTED, _DRAFTED)),),
                    "Drafted tokens that the target kept.",
                    width=6,
                    height=6,
                ),
                Panel(
                    "Tokens per chain",
                    "number",
                    "tokens",
                    (Query(f"1 + {ratio(_ACCEPTED, _CHAINS)}"),),
                    "Kept tokens and the target's own: what one verification of a chain brings.",
                    width=6,
                    height=6,
                ),
                Panel(
                    "Length offered",
                    "number",
                    "tokens",
                    (Query(f"avg ({series('spec_decode_draft_length')})"),),
                    "Mean length of the chains in the last round that had any.",
                    width=6,
                    height=6,
                ),
                Panel(
                    "Configured",
                    "number",
                    "count",
                    (
                        Query(
                            f"sum by ({_SETTINGS}) ({series('config_info')})",
                            "{{speculator}}, {{rule}}, depth {{depth}} ({{depth_policy}}), {{transport}}, "
                            "{{target}} ← {{draft}}",
                        ),
                    ),
                    "What the deployment is set to.",
                    width=6,
                    height=6,
                ),
            ),
        ),
        Row(
            "Chains",
            (
                Panel(
                    "Acceptance over time",
                    "lines",
                    "ratio",
                    (Query(ratio(_ACCEPTED, _DRAFTED), "kept"),),
                    "All places.",
                ),
                Panel(
                    "Acceptance by place",
                    "bars",
                    "ratio",
                    (
                        Query(
                            ratio(
                                summed("spec_decode_num_accepted_tokens_per_pos_total", by="position"),
                                summed("spec_decode_num_draft_tokens_per_pos_total", by="position"),
                            ),
                            "place {{position}}",
                        ),
                    ),
                    "Of the chains that reached a place, the share kept up to there, whatever the lengths.",
                ),
                Panel(
                    "Acceptance by speculator",
                    "lines",
                    "ratio",
                    (
                        Query(
                            ratio(
                                summed(_SOURCES, 'result="kept"', by="source"),
                                summed(_SOURCES, 'result="offered"', by="source"),
                            ),
                            "{{source}}",
                        ),
                    ),
                    "The deployment's own, and those that requests chose; prediction: a text that a client sent along.",
                ),
                Panel(
                    "Tokens kept of a chain",
                    "heatmap",
                    "tokens",
                    (Query(f"sum by (le) ({rate('spec_decode_accepted_length_bucket')})", "{{le}}"),),
                    "How long the kept part is: many short ones, or few long ones.",
                ),
                Panel(
                    "Where tokens come from",
                    "stacked",
                    "tokens/s",
                    (Query(summed("spec_decode_emitted_tokens_total", by="kind"), "{{kind}}"),),
                    "accepted drafts; corrections after a refused one; a bonus after a whole chain; plain without any.",
                ),
                Panel(
                    "Drafts that came to nothing",
                    "stacked",
                    "tokens/s",
                    (Query(summed("spec_decode_wasted_draft_tokens_total", by="reason"), "{{reason}}"),),
                    "Rejected; stale after a commit; of a cancelled request; past a stop; unlikely outcomes.",
                ),
                Panel(
                    "Rows without a draft",
                    "stacked",
                    "per second",
                    (Query(summed("spec_decode_fallback_total", by="reason"), "{{reason}}"),),
                    "Plain rows: the draft is down, slow or has nothing; drafts do not pay (load), or are not wanted.",
                ),
            ),
        ),
        Row(
            "Drafting ahead",
            (
                Panel(
                    "Outcomes",
                    "stacked",
                    "per second",
                    (Query(summed(_OUTCOMES, by="result"), "{{result}}"),),
                    "Verified rows by whether their outcome had been drafted ahead; none: nothing was.",
                ),
                Panel(
                    "Prepared rows",
                    "lines",
                    "ratio",
                    (Query(ratio(summed(_OUTCOMES, 'result=~"hit|miss"'), summed(_OUTCOMES)), "prepared"),),
                    "Rows for which anything was drafted ahead. Of these, hits ÷ (hits + misses) is the hit rate.",
                ),
                Panel(
                    "Outcomes drafted",
                    "lines",
                    "per second",
                    (Query(summed("spec_decode_outcomes_drafted_total"), "drafted ahead"),),
                    "Guesses at what the verification in flight will say.",
                ),
                Panel(
                    "Rules",
                    "bars",
                    "count",
                    (Query(f"max by (rule) ({series('rule_lossless')})", "{{rule}}"),),
                    "1: answers have exactly the target's distribution; 0: a lossy rule.",
                    width=24,
                    height=5,
                ),
            ),
        ),
    ),
)
