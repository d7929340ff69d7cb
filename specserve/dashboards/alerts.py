"""When somebody should look: rules for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GROUP = "specserve"
_BY_MODEL = "sum by (model_name)"


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that holds for a while. `says` is shown to whoever is called, `does` what to look at first."""

    name: str
    expr: str
    lasts: str
    severity: Literal["page", "ticket"]
    says: str
    does: str


def _rate(name: str, matchers: str = "", window: str = "5m") -> str:
    return f"{_BY_MODEL} (rate(specserve_{name}{matchers}[{window}]))"


ALERTS = (
    Alert(
        "SpecserveTargetDown",
        'max by (model_name) (specserve_worker_up{role="target"}) == 0',
        "1m",
        "page",
        "The target of {{ $labels.model_name }} has been away for a minute: nobody is answered.",
        "The pipeline restarts it; look at the logs of the target's actor and at its memory.",
    ),
    Alert(
        "SpecserveDraftDown",
        'max by (model_name) (specserve_worker_up{role="draft"}) == 0 '
        'and on (model_name) max by (model_name) (specserve_config_info{speculator="small_model", depth!="0"}) == 1',
        "2m",
        "ticket",
        "{{ $labels.model_name }} decodes plainly: its draft worker has been away for two minutes.",
        "Answers are right and slower; look at the logs of the draft's actor.",
    ),
    Alert(
        "SpecserveLowAcceptance",
        f"{_rate('spec_decode_num_accepted_tokens_total')} / ({_rate('spec_decode_num_draft_tokens_total')} > 1) < 0.2",
        "5m",
        "ticket",
        "Only {{ $value | humanizePercentage }} of the drafted tokens of {{ $labels.model_name }} are kept.",
        "Drafting costs more than it brings: lower engine.depth, or use a draft that is closer to the target.",
    ),
    Alert(
        "SpecserveFallingBack",
        _rate("spec_decode_fallback_total", '{reason!~"request|load"}') + " / "
        f"({_rate('spec_decode_num_drafts_total')} + {_rate('spec_decode_fallback_total')} > 0.1) > 0.5",
        "5m",
        "ticket",
        "More than half of the decode rows of {{ $labels.model_name }} run without a draft.",
        "See the board `speculation`, rows without a draft: the draft worker is down, slow, or short of slots.",
    ),
    Alert(
        "SpecserveKvNearlyFull",
        "max by (model_name, role) (specserve_kv_cache_usage_ratio) > 0.95",
        "5m",
        "ticket",
        "The {{ $labels.role }} of {{ $labels.model_name }} holds {{ $value | humanizePercentage }} of its KV blocks.",
        "Requests will be preempted: lower engine.max_requests or raise kv_memory_gib.",
    ),
    Alert(
        "SpecserveQueueWaits",
        "histogram_quantile(0.99, sum by (model_name, le) (rate(specserve_request_queue_time_seconds_bucket[5m]))) > 5",
        "5m",
        "page",
        "One request in a hundred waits {{ $value | humanizeDuration }} for a place with {{ $labels.model_name }}.",
        "The load is above what the pipeline serves: add capacity, or lower engine.queue_limit to refuse earlier.",
    ),
    Alert(
        "SpecserveTurningAway",
        'sum (rate(specserve_http_requests_rejected_total{reason=~"queue_full|rate_limit_exceeded|unavailable"}[5m]))'
        " / "
        '(sum (rate(specserve_http_requests_total{method="POST"}[5m])) > 0.05) > 0.05',
        "5m",
        "page",
        "{{ $value | humanizePercentage }} of the requests are turned away: queues are full, or nobody serves.",
        "See the board `overview`, refused at the door: queue_full wants capacity; rate_limit_exceeded is a key's.",
    ),
    Alert(
        "SpecserveGoodputLow",
        _rate("request_slo_total", '{slo="all", met="true"}')
        + " / ("
        + _rate("request_slo_total", '{slo="all"}')
        + " > 0.05)"
        " < 0.9",
        "10m",
        "page",
        "Only {{ $value | humanizePercentage }} of the requests to {{ $labels.model_name }} met what is promised.",
        "See the board `overview`, promises kept: it says which limit of observe.slo is missed.",
    ),
    Alert(
        "SpecserveWorkerRestarts",
        "sum by (model_name, role) (increase(specserve_worker_restarts_total[15m])) > 2",
        "0m",
        "ticket",
        "The {{ $labels.role }} worker of {{ $labels.model_name }} keeps dying.",
        "Look for out-of-memory kills on its node.",
    ),
    Alert(
        "SpecserveServerErrors",
        'sum (rate(specserve_http_requests_total{code=~"5.."}[5m])) / '
        "(sum (rate(specserve_http_requests_total[5m])) > 0.05) > 0.05",
        "5m",
        "page",
        "{{ $value | humanizePercentage }} of the answers are server errors.",
        "Look for the request ids of the errors in the logs.",
    ),
)


def rules() -> dict[str, object]:
    """The rule file as plain data."""
    return {
        "groups": [
            {
                "name": GROUP,
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.lasts,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.says, "description": alert.does},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }
