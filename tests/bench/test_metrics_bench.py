"""The bench of what it costs to be watched: off counts nothing, on counts all, and all three answer alike."""

from __future__ import annotations

import json

import pytest
from scraped import Scrape
from tiny_models import tiny_llama

from specserve.bench import metrics
from specserve.bench.coordinator import MODES, Drive
from specserve.bench.coordinator import Options as DriveOptions
from specserve.cli import main
from specserve.errors import ConfigError
from specserve.metrics import EngineMetrics

pytest.importorskip("opentelemetry.sdk", reason="needs the extra specserve[tracing]")


def test_each_system_has_its_rows(tmp_path, capsys):
    """Ratios are against the same pass without metrics; the JSON holds both tables."""
    path = tmp_path / "metrics.json"
    models = [str(tiny_llama(tmp_path / name, seed=1)) for name in ("target", "draft")]
    settings = [
        f"--set={key}={value}" for key, value in zip(("target.source", "draft.model.source"), models, strict=True)
    ]
    arguments = ["--passes", "2", "--prompts", "2", "--max-tokens", "4", "--batch", "2", "--rounds", "4"]
    assert main(["bench", "metrics", *settings, *arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    systems = ["off", "metrics", "metrics and traces"]
    assert [row["system"] for row in rows] == systems * 2
    assert rows[0]["against_off"] == 1.0
    assert all(0 < row["lowest"] <= row["against_off"] <= row["highest"] for row in rows[:3])
    assert rows[3]["more_ms"] == 0
    assert "coordinator" in capsys.readouterr().out


def test_off_counts_nothing_and_changes_no_answer():
    """The same rounds, once counted and once not: no series moves, and no token differs."""
    counted, uncounted = EngineMetrics("bench", 4), metrics.Uncounted("bench", 4)
    drives = [
        Drive(MODES["ahead1"], 0.0, 2, DriveOptions(context=20, rounds=10), each) for each in (counted, uncounted)
    ]
    before = Scrape(uncounted.render())
    for drive in drives:
        for _ in range(10):
            drive.round()
    tokens = [[state.tokens for state in drive._engine._states.values()] for drive in drives]
    assert tokens[0] == tokens[1]
    assert Scrape(uncounted.render()).values == before.values
    moved = Scrape(counted.render())
    for name in ("generation_tokens_total", "round_seconds_count", "worker_busy_seconds_total", "slots_capacity"):
        assert moved.sum(f"specserve_{name}") > 0


def test_none_is_always_first():
    """Orders rotate through all systems."""
    assert [metrics.rotated("abc", n) for n in range(4)] == [list(each) for each in ("abc", "bca", "cab", "abc")]


def test_what_cannot_be_run_is_refused():
    """Nothing is loaded for it."""
    with pytest.raises(ConfigError, match="from 1"):
        metrics.Options(passes=0).check()
