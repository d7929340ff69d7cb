"""The pipeline bench: its limits are the closed forms, its rows what the counters say."""

from __future__ import annotations

import random
from contextlib import nullcontext
from importlib.util import find_spec

import pytest

from specserve.bench import pipeline
from specserve.bench.limits import Load, tokens_per_s
from specserve.bench.pipeline import Options, configured, row_of
from specserve.bench.steady import Ask, Counters, prompt
from specserve.errors import ConfigError
from specserve.metrics import EngineMetrics
from specserve.models import _device_profile
from specserve.types import AheadStats, RoundStats

PROFILE = _device_profile.load("qwen3-32b-0.6b-h100")
DRAFT_S, VERIFY_S, PLAIN_S = 0.00254, 0.01145, 0.01027
ALL_FOUR = (1 - 0.78**5) / (1 - 0.78)
"""Tokens of a round with four drafted ones at acceptance 0.78."""


@pytest.mark.parametrize(
    ("mode", "load", "round_s"),
    [
        ("plain", Load(1, 1, 0, 0), PLAIN_S),
        ("serial", Load(1, ALL_FOUR, 1, 4), 4 * DRAFT_S + VERIFY_S),
        ("ahead", Load(1, ALL_FOUR, 1, 4), VERIFY_S),
        ("ahead", Load(1, ALL_FOUR, 1, 4, 3), VERIFY_S),
        ("ahead", Load(1, ALL_FOUR, 1, 4, 5), 5 * DRAFT_S),
        ("ahead1", Load(1, 0.9 * ALL_FOUR + 0.1, 0.9, 3.6), 0.9 * VERIFY_S + 0.1 * PLAIN_S),
        ("ahead", Load(1, 1, 0, 0), PLAIN_S),
        ("ahead", Load(1, ALL_FOUR, 1, 4, 4, in_turns=1.0), 4 * DRAFT_S + VERIFY_S),
        ("ahead", Load(1, ALL_FOUR, 1, 4, 4.5, in_turns=0.5), 0.5 * (4 * DRAFT_S + VERIFY_S) + 0.5 * 5 * DRAFT_S),
        ("ahead", Load(1, ALL_FOUR, 1, 4, 5, in_turns=1.0), 4 * DRAFT_S + VERIFY_S + DRAFT_S),
    ],
)
def test_limits_at_batch_one_are_the_closed_forms(mode, load, round_s):
    """One row on the measured pair, with drafts always, in nine of ten rounds, and never."""
    assert tokens_per_s(PROFILE, mode, 4, load) == pytest.approx(load.tokens / round_s)


def test_the_limit_of_many_rows_is_what_a_simulation_of_their_rounds_gives():
    """32 rows that have a draft of four in 60 % of rounds, each by itself: 4,000 rounds with the profile's steps."""
    chance = random.Random(5)
    target = PROFILE.target
    total_s = 0.0
    for _ in range(4000):
        drafted = sum(chance.random() < 0.6 for _ in range(32))
        total_s += target.step_s(32, 32 + 4 * drafted)
    load = Load(32, 2.5, 0.6, 2.4)
    assert tokens_per_s(PROFILE, "ahead", 4, load) == pytest.approx(32 * 2.5 * 4000 / total_s, rel=0.01)


def exposition(*rounds: RoundStats) -> str:
    metrics = EngineMetrics("m", max_depth=4)
    for stats in rounds:
        metrics.round(stats)
        metrics.computed("draft", {"draft": stats.draft_busy_s}, 0.001)
        metrics.computed("target", {"forward": stats.forward_s, "sampling": stats.sampling_s}, 0.001)
        metrics.overlapped(0.003)
        metrics.stepped("draft", (10, 2, 1))
        metrics.stepped("target", (1, 0, 0))
    return metrics.render()


def stats(drafted_at=(2, 2), kept_at=(2, 1), bonus=1, correction=1, plain=1):
    foreseen = AheadStats(hits=2, misses=1)
    return RoundStats(
        3, 7, 0, 0.020, 0.012, 0.011, 0.001, drafted_at, kept_at, correction, bonus, plain, ahead=foreseen
    )


def test_counters_are_read_from_the_engines_own_metrics():
    """Three rows, two of them with drafts of two: what a round adds is the difference of two texts."""
    before, after = (Counters.of(exposition(*[stats()] * count)) for count in (1, 3))
    added = after.since(before)
    assert (added.tokens, added.kept, added.drafts, added.drafted, added.steps) == (12, 6, 4, 8, 6)
    assert added.refused == 2
    assert (added.wall_s, added.draft_s, added.target_s) == pytest.approx((0.04, 0.024, 0.024))


def test_a_row_of_the_table_follows_from_the_counters():
    """Rates, shares and the overlap; serial has no hit rate."""
    counted = Counters.of(exposition(*[stats()] * 5))
    ask, options = Ask(3, 0.7, 2), Options(depths=(2,))
    ahead, serial = (row_of(mode, ask, options, PROFILE, counted) for mode in ("ahead", "serial"))
    wanted = "profile rule temperature batch mode depth tokens_per_s limit_tokens_per_s efficiency hit_rate draft_busy"
    assert list(ahead)[:13] == [*wanted.split(), "target_busy", "overlap"]
    assert ahead["tokens_per_s"] == pytest.approx(6 / 0.02)
    assert ahead["efficiency"] == pytest.approx(ahead["tokens_per_s"] / ahead["limit_tokens_per_s"])
    assert (ahead["draft_busy"], ahead["target_busy"], ahead["overlap"]) == pytest.approx((0.6, 0.6, 0.15))
    assert ahead["hit_rate"] == pytest.approx(2 / 3)
    assert serial["hit_rate"] is None
    (shown,) = pipeline.table([ahead])
    assert list(shown.values())[:-2] == list(ahead.values())[2:-7]
    assert list(shown.values())[-2:] == ["10, 5 of 65", "0, 0 of 5"]
    assert ahead["limit_tokens_per_s"] == pytest.approx(6 / (13 * PROFILE.draft.step_s(3, 3)))  # its steps in a round


def test_acceptance_is_of_the_drafted_tokens_that_the_target_got_to():
    """Chains of two: one kept whole, one refused at its end, one at its start. Three of five tokens looked at stood."""
    counted = Counters.of(exposition(stats(drafted_at=(3, 3), kept_at=(2, 1), bonus=1, correction=2, plain=0)))
    row = row_of("ahead", Ask(3, 0.0, 2), Options(), PROFILE, counted)
    assert row["acceptance"] == pytest.approx(3 / 5)
    plain = stats(drafted_at=(), kept_at=(), bonus=0, correction=0, plain=3)
    assert row_of("plain", Ask(3, 0.0, 0), Options(), PROFILE, Counters.of(exposition(plain)))["acceptance"] is None


def test_loads_of_different_texts_share_no_prompt():
    """Forty rounds of 64 requests, and of one."""
    for rows in (1, 64):
        prompts = {tuple(prompt(number)) for texts in range(40) for number in Ask(rows, 0.0, 4, texts).numbers}
        assert len(prompts) == 40 * rows


class Windows:
    """A server whose n-th window of a case has n + 1 rounds of three rows; it notes what it was asked for."""

    def __init__(self):
        self.asked = []

    def measure(self, ask, window_s):
        self.asked.append(ask)
        return Counters.of(exposition(*[stats(bonus=1 + ask.texts)] * (1 + ask.texts)))


def test_every_round_of_windows_has_texts_of_its_own_and_a_row_is_of_all_of_them(monkeypatch):
    """Three windows of two cases: both see the same texts, and the figures are of what the windows bring together."""
    server = Windows()
    monkeypatch.setattr(pipeline, "_served", lambda config: nullcontext(server))
    options = Options(modes=("plain", "serial"), batches=(1,), temperatures=(0.0,), rounds=3, window_s=1.0)
    rows = pipeline.measure(options, lambda line: None)
    assert [(ask.depth, ask.texts) for ask in server.asked] == [(0, 0), (4, 0), (0, 1), (4, 1), (0, 2), (4, 2)]
    for row in rows:  # 6, 7 and 8 tokens a round of 20 ms, in 1, 2 and 3 rounds
        assert row["tokens_per_s"] == pytest.approx((6 + 2 * 7 + 3 * 8) / (6 * 0.02))
        assert [row["slowest"], row["median"], row["fastest"]] == pytest.approx([6 / 0.02, 7 / 0.02, 8 / 0.02])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"modes": ("backwards",)}, "no mode called backwards"),
        ({"batches": (0,)}, "--batch"),
        ({"temperatures": (-1.0,)}, "--temperature"),
        ({"depths": (0,)}, "--depth"),
        ({"window_s": 1e3}, "--window"),
        ({"rounds": 0}, "--rounds"),
        ({"profile": "none"}, "device profile"),
    ],
)
def test_what_cannot_be_run_is_refused_before_ray_starts(wrong, told):
    """Nothing is started for it."""
    with pytest.raises(ConfigError, match=told):
        pipeline.measure(Options(**wrong), pytest.fail)


def test_servers_are_strict_and_as_wide_as_the_widest_case():
    """Every request of a case decodes in every round; a step that is too slow ends the run."""
    config = configured(Options(batches=(1, 200), depths=(2, 7), acceptance=0.5), "serial")
    assert config.target.emulated.strict
    assert config.draft.model.emulated.strict
    assert config.draft.model.emulated.acceptance == 0.5
    assert config.engine.max_requests == 200
    assert config.engine.max_batch_tokens >= 200 * 8
    assert config.engine.depth == 7


def test_each_mode_is_a_setting_of_the_engine():
    """Plain and serial share a server, whose draft works only when a verdict is there; adaptive is the only policy."""
    engines = {mode: configured(Options(transport="ray"), mode).engine for mode in pipeline.MODES}
    assert engines["plain"] == engines["serial"]
    assert [engine.outcomes for engine in engines.values()] == [0, 0, 1, "auto", "auto"]
    assert [mode for mode, engine in engines.items() if engine.depth_policy == "adaptive"] == ["adaptive"]
    assert configured(Options(transport="ray"), "plain").cluster.transport == "ray"


def test_a_plot_has_a_panel_for_each_temperature_or_says_what_is_missing(tmp_path):
    """Where matplotlib is not installed, the error names it."""
    counted = Counters.of(exposition(*[stats()] * 5))
    asks = [Ask(batch, temperature, 2) for batch in (1, 8) for temperature in (0.0, 1.0)]
    rows = [row_of("serial", ask, Options(depths=(2,)), PROFILE, counted) for ask in asks]
    path = tmp_path / "plot.svg"
    if find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="pip install matplotlib"):
            pipeline.plot(rows, path)
        return
    pipeline.plot(rows, path)
    assert path.read_text().count('id="axes_') == 2
