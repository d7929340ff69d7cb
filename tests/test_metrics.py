"""Facts about the exported metrics."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specserve.metrics import ENGINE_METRICS, HTTP_METRICS, EngineMetrics, HttpMetrics
from specserve.types import PoolLevels, RequestStats, RoundStats

ROUND = RoundStats(
    rows=5,
    positions=20,
    prefill_tokens=7,
    wall_s=0.2,
    draft_busy_s=0.05,
    forward_s=0.1,
    sampling_s=0.01,
    drafted_at=(4, 3, 2),
    kept_at=(3, 1, 1),
    correction=3,
    bonus=1,
    plain=1,
)
STATS = RequestStats(
    prompt_tokens=10,
    generated_tokens=5,
    rounds=2,
    drafted_tokens=6,
    kept_tokens=3,
    histogram=(0, 1, 1),
    queue_s=0.1,
    first_token_s=0.5,
    total_s=2.5,
)


def samples(text: str) -> dict[str, float]:
    """Series → value; series are written name{label=value,…} without model_name."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "model_name")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_every_metric_of_the_tables_is_exported_at_zero() -> None:
    """Before anything happened each family is there, and every value is 0."""
    engine, http = EngineMetrics("m", max_depth=2), HttpMetrics([("/health", "GET")])
    engine.rules({"typical": False})  # the verifier brings the names of the rules
    values = samples(engine.render() + http.render())
    for metric in (*ENGINE_METRICS, *HTTP_METRICS):
        assert any(series.startswith(metric.name) for series in values), metric.name
    assert set(values.values()) == {0.0}
    assert "specserve_spec_decode_num_draft_tokens_per_pos_total{position=1}" in values
    assert "specserve_kv_blocks{role=draft,state=free}" in values


def test_names_carry_units_and_are_unique() -> None:
    """Counters end in _total, times in _seconds; no family is in both tables."""
    names = [metric.name for metric in (*ENGINE_METRICS, *HTTP_METRICS)]
    assert len(set(names)) == len(names)
    for metric in (*ENGINE_METRICS, *HTTP_METRICS):
        assert re.fullmatch(r"specserve_[a-z0-9_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert metric.kind != "histogram" or metric.name.endswith("_seconds")


def test_each_series_carries_the_model_name() -> None:
    """All engine series are labelled with the model."""
    for family in text_string_to_metric_families(EngineMetrics("org/model").render()):
        assert all(sample.labels["model_name"] == "org/model" for sample in family.samples)


def test_a_round_is_counted() -> None:
    """Drafts, positions, emitted kinds and busy times of one round arrive in their series."""
    engine = EngineMetrics("m")
    engine.round(ROUND)
    values = samples(engine.render())
    prefix = "specserve_spec_decode_"
    assert values[prefix + "num_drafts_total"] == 4
    assert values[prefix + "num_draft_tokens_total"] == 9
    assert values[prefix + "num_accepted_tokens_total"] == 5
    assert [values[prefix + f"num_accepted_tokens_per_pos_total{{position={k}}}"] for k in range(3)] == [3, 1, 1]
    assert [values[prefix + f"num_draft_tokens_per_pos_total{{position={k}}}"] for k in range(3)] == [4, 3, 2]
    assert values["specserve_worker_busy_seconds_total{phase=verify}"] == pytest.approx(0.1)
    assert values["specserve_round_seconds_count"] == 1
    assert values["specserve_prefill_tokens_total"] == 7


def test_emitted_kinds_sum_to_the_generated_tokens() -> None:
    """Every generated token has exactly one origin."""
    engine = EngineMetrics("m")
    for _ in range(3):
        engine.round(ROUND)
    values = samples(engine.render())
    emitted = sum(value for series, value in values.items() if "emitted_tokens_total" in series)
    assert emitted == values["specserve_generation_tokens_total"] == 30


def test_an_ended_request_is_counted() -> None:
    """Latencies are observed once; the time per token leaves the first token out."""
    engine = EngineMetrics("m")
    engine.ended("stop", STATS)
    values = samples(engine.render())
    assert values["specserve_request_success_total{finished_reason=stop}"] == 1
    assert values["specserve_prompt_tokens_total"] == 10
    assert values["specserve_request_time_per_output_token_seconds_sum"] == pytest.approx(0.5)
    assert values["specserve_time_to_first_token_seconds_sum"] == pytest.approx(0.5)


def test_levels_and_single_events_are_counted() -> None:
    """Free is capacity minus held; drops, waste, rejections, preemptions and worker states have their series."""
    engine = EngineMetrics("m")
    engine.levels(PoolLevels(2, 3, 4, 10, 5, 20, 6, 30))
    engine.dropped("stale_push", 2)
    engine.wasted("stale", 7)
    engine.rejected("queue_full")
    engine.preempted()
    engine.worker("draft", True)
    values = samples(engine.render())
    assert values["specserve_slots{state=free}"] == 6
    assert values["specserve_kv_blocks{role=target,state=free}"] == 15
    assert values["specserve_kv_blocks{role=draft,state=held}"] == 6
    assert values["specserve_dropped_messages_total{reason=stale_push}"] == 2
    assert values["specserve_spec_decode_wasted_draft_tokens_total{reason=stale}"] == 7
    assert values["specserve_requests_rejected_total{reason=queue_full}"] == 1
    assert values["specserve_preemptions_total"] == 1
    assert values["specserve_worker_up{role=draft}"] == 1
    assert values["specserve_worker_up{role=target}"] == 0


def test_no_label_carries_what_a_client_sent() -> None:
    """Unknown reasons, field names, paths and methods all count as "other"."""
    engine, http = EngineMetrics("m"), HttpMetrics([("/health", "GET")])
    engine.rejected("SECRET")
    engine.dropped("SECRET")
    engine.ended("SECRET", STATS)
    http.unknown_param("SECRET")
    http.started()
    http.ended("/SECRET", "SECRET", 404)
    text = engine.render() + http.render()
    assert "SECRET" not in text
    values = samples(text)
    assert values["specserve_unknown_params_total{param=other}"] == 1
    assert values["specserve_http_requests_total{code=404,method=other,route=other}"] == 1
    assert values["specserve_http_inflight_requests"] == 0


def test_two_boards_do_not_share_anything() -> None:
    """Each object has a registry of its own."""
    one, two = EngineMetrics("m"), EngineMetrics("m")
    one.preempted()
    assert samples(two.render())["specserve_preemptions_total"] == 0
