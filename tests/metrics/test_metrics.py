"""Facts about the exported metrics."""

from __future__ import annotations

import re
from dataclasses import replace

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specserve.config import Config, SloConfig
from specserve.metrics import ENGINE_METRICS, HTTP_METRICS, EngineMetrics, HttpMetrics
from specserve.metrics.board import Board, Histogram
from specserve.metrics.table import Metric
from specserve.types import AheadStats, PoolLevels, RequestStats, RoundStats, WorkerInfo

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
INFO = WorkerInfo("draft", "cpu", 10, 16, 256, 100, weights_bytes=4096, load_s=1.5)
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
    engine.configured(Config(), "1.2.3")
    values = samples(engine.render() + http.render())
    for metric in (*ENGINE_METRICS, *HTTP_METRICS):
        assert any(series.startswith(metric.name) for series in values), metric.name
    facts = {"specserve_build_info", "specserve_config_info"}
    assert {value for series, value in values.items() if series.partition("{")[0] not in facts} == {0.0}
    assert "specserve_spec_decode_num_draft_tokens_per_pos_total{position=1}" in values
    assert "specserve_kv_blocks{role=draft,state=free}" in values
    assert "specserve_worker_busy_seconds_total{phase=sampling,role=target}" in values
    assert "specserve_worker_busy_seconds_total{phase=sampling,role=draft}" not in values


def test_names_carry_units_and_are_unique() -> None:
    """Counters end in _total, times in _seconds; no family is in both tables."""
    names = [metric.name for metric in (*ENGINE_METRICS, *HTTP_METRICS)]
    assert len(set(names)) == len(names)
    for metric in (*ENGINE_METRICS, *HTTP_METRICS):
        assert re.fullmatch(r"specserve_[a-z0-9_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert metric.kind != "histogram" or metric.name.endswith(("_seconds", "_tokens", "_length"))


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
    assert values["specserve_round_seconds_count"] == 1
    assert values["specserve_prefill_tokens_total"] == 7


def test_lengths_kept_are_counted_chain_by_chain() -> None:
    """Of four chains one kept nothing, two kept one token, and one all three."""
    engine = EngineMetrics("m")
    engine.round(ROUND)
    values = samples(engine.render())
    name = "specserve_spec_decode_accepted_length"
    assert [values[f"{name}_bucket{{le={k}.0}}"] for k in range(4)] == [1, 3, 3, 4]
    assert values[f"{name}_sum"] == sum(ROUND.kept_at)
    assert values["specserve_spec_decode_draft_length"] == 9 / 4


def test_a_gap_is_shared_by_the_tokens_that_it_brought() -> None:
    """The step interval counts once; the latency between tokens once per token, in equal parts."""
    engine = EngineMetrics("m")
    engine.round(replace(ROUND, gaps={(0.4, 4): 1, (0.1, 1): 1}))
    values = samples(engine.render())
    assert values["specserve_step_interval_seconds_count"] == 2
    assert values["specserve_inter_token_latency_seconds_count"] == 5
    assert values["specserve_inter_token_latency_seconds_sum"] == pytest.approx(0.5)
    assert values["specserve_inter_token_latency_seconds_bucket{le=0.08}"] == 0


def test_what_drafting_ahead_came_to_is_counted() -> None:
    """Hits, misses and rows without anything drafted ahead; fallbacks by reason."""
    engine = EngineMetrics("m")
    engine.round(replace(ROUND, ahead=AheadStats(3, 1, 2, 9), fallbacks={"draft_slow": 2}))
    values = samples(engine.render())
    outcomes = "specserve_spec_decode_outcomes_total"
    assert [values[f"{outcomes}{{result={result}}}"] for result in ("hit", "miss", "none")] == [3, 1, 2]
    assert values["specserve_spec_decode_outcomes_drafted_total"] == 9
    assert values["specserve_spec_decode_fallback_total{reason=draft_slow}"] == 2


def test_goodput_counts_requests_that_met_everything() -> None:
    """One late first token spoils `all`; a request that the client gave up is not judged."""
    engine = EngineMetrics("m", slo=SloConfig(ttft_s=0.4, tpot_s=1, e2e_s=9))
    engine.ended("stop", STATS)
    engine.ended("stop", replace(STATS, first_token_s=0.3))
    engine.ended("abort", STATS)
    values = samples(engine.render())
    slo = {key: value for key, value in values.items() if key.startswith("specserve_request_slo_total") and value}
    assert {key[len("specserve_request_slo_total") :]: value for key, value in slo.items()} == {
        "{met=false,slo=ttft}": 1,
        "{met=true,slo=ttft}": 1,
        "{met=true,slo=tpot}": 2,
        "{met=true,slo=e2e}": 2,
        "{met=false,slo=all}": 1,
        "{met=true,slo=all}": 1,
    }


def test_a_worker_that_comes_back_is_a_restart() -> None:
    """The first joining is none."""
    engine = EngineMetrics("m")
    name = "specserve_worker_restarts_total{{reason={},role=draft}}".format
    for up in (0, 1):
        engine.joined("draft", INFO)
        assert samples(engine.render())[name("replaced")] == up
    engine.lost("draft", "hung")
    assert samples(engine.render())["specserve_worker_up{role=draft}"] == 0
    engine.joined("draft", INFO)
    values = samples(engine.render())
    assert (values[name("replaced")], values[name("hung")], values[name("lost")]) == (1, 1, 0)
    assert values["specserve_model_weights_bytes{role=draft}"] == INFO.weights_bytes
    assert values["specserve_worker_up{role=draft}"] == 1


def test_network_counters_follow_totals() -> None:
    """Totals are taken as they are, and a lower one changes nothing."""
    engine = EngineMetrics("m")
    engine.network([("to_draft", "plan", 3, 600)], {"to_draft": 0.5})
    engine.network([("to_draft", "plan", 2, 100)], {"to_draft": 0.1})
    values = samples(engine.render())
    assert values["specserve_network_bytes_total{kind=plan,link=to_draft}"] == 600
    assert values["specserve_network_messages_total{kind=plan,link=to_draft}"] == 3
    assert values["specserve_serialization_seconds_total{link=to_draft}"] == 0.5


def test_emitted_kinds_sum_to_the_generated_tokens() -> None:
    """Every generated token has exactly one origin."""
    engine = EngineMetrics("m")
    for _ in range(3):
        engine.round(ROUND)
    values = samples(engine.render())
    emitted = sum(value for series, value in values.items() if "emitted_tokens_total" in series)
    assert emitted == values["specserve_generation_tokens_total"] == 30


def test_drafts_are_counted_by_who_made_them() -> None:
    """The deployment's speculator, that of a request, and one by dotted path, whose name is nobody's label."""
    engine = EngineMetrics("m")
    engine.configured(Config(), "1")
    engine.round(replace(ROUND, sources={None: (5, 3), "prediction": (4, 2), "mine.guesser": (2, 1)}))
    values = samples(engine.render())
    name = "specserve_spec_decode_source_draft_tokens_total{{result={},source={}}}".format
    for source, counts in (("small_model", (5, 3)), ("prediction", (4, 2)), ("other", (2, 1)), ("ngram", (0, 0))):
        assert (values[name("offered", source)], values[name("kept", source)]) == counts


def test_an_ended_request_is_counted() -> None:
    """Latencies are observed once; the time per token leaves the first token out."""
    engine = EngineMetrics("m")
    engine.ended("stop", replace(STATS, cached_tokens=4))
    values = samples(engine.render())
    assert values["specserve_request_success_total{finished_reason=stop}"] == 1
    assert values["specserve_prompt_tokens_total"] == 10
    assert values["specserve_prompt_tokens_cached_total"] == 4
    assert values["specserve_request_time_per_output_token_seconds_sum"] == pytest.approx(0.5)
    assert values["specserve_time_to_first_token_seconds_sum"] == pytest.approx(0.5)


def test_levels_and_single_events_are_counted() -> None:
    """Free is capacity minus held; drops, waste, rejections, preemptions and worker states have their series."""
    engine = EngineMetrics("m")
    engine.levels(PoolLevels(2, 3, 4, 10, 5, 20, 6, 30, slots_drafting=1, slots_verifying=2))
    engine.dropped("stale_push", 2)
    engine.wasted("stale", 7)
    engine.rejected("queue_full")
    engine.preempted()
    engine.worker("draft", True)
    values = samples(engine.render())
    assert values["specserve_slots{state=free}"] == 6
    assert [values[f"specserve_slots{{state={state}}}"] for state in ("drafting", "drafted", "verifying")] == [1, 1, 2]
    assert sum(v for k, v in values.items() if k.startswith("specserve_slots{")) == values["specserve_slots_capacity"]
    assert values["specserve_kv_blocks{role=target,state=free}"] == 15
    assert values["specserve_kv_cache_usage_ratio{role=target}"] == 0.25
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
    http.unknown_params(["SECRET"])
    http.rejected("SECRET")
    http.started()
    http.ended("/SECRET", "SECRET", 404)
    text = engine.render() + http.render()
    assert "SECRET" not in text
    values = samples(text)
    assert values["specserve_unknown_params_total{param=other}"] == 1
    assert values["specserve_http_requests_rejected_total{reason=other}"] == 1
    assert values["specserve_http_requests_total{code=404,method=other,route=other}"] == 1
    assert values["specserve_http_inflight_requests"] == 0


def test_two_boards_do_not_share_anything() -> None:
    """Each object has a registry of its own."""
    one, two = EngineMetrics("m"), EngineMetrics("m")
    one.preempted()
    assert samples(two.render())["specserve_preemptions_total"] == 0


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 1.5, 9.0])
def test_many_observations_at_once_are_as_many_one_by_one(value) -> None:
    """Sum and buckets, also on a bucket's bound and beyond the last one."""
    together, apart = (Histogram((0.5, 1.0, 2.0)) for _ in range(2))
    together.observe(value, 3)
    for _ in range(3):
        apart.observe(value)
    assert list(together.samples("h", ())) == list(apart.samples("h", ()))


@pytest.mark.parametrize("metric", [each for each in ENGINE_METRICS if each.kind == "histogram"], ids=lambda m: m.name)
def test_a_histogram_says_what_one_of_the_library_says(metric) -> None:
    """Names, bounds as they are written, and what each bucket counts."""
    theirs = prometheus_client.Histogram(metric.name, "", registry=None, buckets=metric.buckets)
    ours = Histogram(metric.buckets)
    for value in (0.0, *metric.buckets[::2], 0.7, 3.0, 2e7):
        ours.observe(value)
        theirs.observe(value)
    told = [each for family in theirs.collect() for each in family.samples if not each.name.endswith("_created")]
    expected = [((each.name, tuple(each.labels.items())), each.value) for each in told]
    assert list(ours.samples(metric.name, ())) == expected


def test_a_board_refuses_what_its_table_does_not_have() -> None:
    """Counters do not fall, and a series has all of its labels."""
    board = Board([Metric("a_total", "counter", "", {"kind": ("x",)})], {})
    with pytest.raises(ValueError, match="fall"):
        board.counter("a_total", "x").inc(-1)
    with pytest.raises(ValueError, match="labels kind"):
        board.counter("a_total")
    with pytest.raises(KeyError):
        board.counter("b_total")
