"""The bench of a step's cost: every case has a row, and the least that a step can take is counted right."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_models import tiny_llama

from specserve.bench import curves
from specserve.cli import main
from specserve.config import parse
from specserve.errors import ConfigError


def test_every_case_is_timed_once(tmp_path, capsys) -> None:
    """Contexts at one request, requests at the shortest context, by positions; the JSON holds the rows shown."""
    tiny_llama(tmp_path / "model", seed=1)
    path = tmp_path / "curves.json"
    sizes = ["--context", "8,16", "--requests", "1,3", "--positions", "1,2", "--repeats", "1"]
    source = ["--target", str(tmp_path / "model")]
    assert main(["bench", "curves", *sizes, *source, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    found = [(row["positions"], row["requests"], row["context"]) for row in rows]
    assert found == [(p, *pair) for p in (1, 2) for pair in [(1, 8), (1, 16), (3, 8)]]
    for row in rows:
        assert row["share_of_copy"] == pytest.approx(row["weights_gb_per_s"] / row["copy_gb_per_s"])
        assert row["least_ms"] > 0
    assert "one step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (curves.Case(1, 1, 99), (4000 + 100 * 8) / 1000),
        (curves.Case(4, 1, 99), (4000 + 4 * 100 * 8) / 1000),
        (curves.Case(64, 5, 5), 2 * 1000 * 64 * 5 / 10_000),
    ],
    ids=["weights and context", "more contexts", "multiplications"],
)
def test_the_least_time_is_that_of_reading_or_of_multiplying(case: curves.Case, expected: float) -> None:
    """1,000 float32 weights and 8 bytes of KV per position, at 1,000 bytes and 10,000 operations a second."""
    work = curves.Work(weights_bytes=4000, kv_bytes=8, weight_bytes_each=4)
    assert work.least_s(case, curves.Machine(1000, 10_000)) == pytest.approx(expected)


def test_requests_that_grow_together_own_alternating_blocks() -> None:
    """No block twice, each row's in order, and never consecutive."""
    batch = curves.Case(requests=3, positions=2, context=30).batch(16, 100)
    assert batch.tables.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert batch.positions.tolist() == [30, 31] * 3
    assert batch.wanted.tolist() == list(range(6))
    assert np.array_equal(batch.offsets, [0, 2, 4, 6])


@pytest.mark.parametrize("wrong", [{"contexts": (0,)}, {"requests": (1, 0)}, {"positions": (0,)}, {"repeats": 0}])
def test_sizes_that_cannot_be_run_are_refused(wrong) -> None:
    """Nothing is loaded for sizes below the least."""
    with pytest.raises(ConfigError, match="take numbers from 1"):
        curves.measure(parse({}), curves.Options(**wrong), lambda _: None)


def test_contexts_longer_than_the_models_are_refused(tmp_path) -> None:
    """The message has both numbers."""
    tiny_llama(tmp_path, seed=1)
    config = parse({"target": {"source": str(tmp_path), "device": "cpu"}})
    with pytest.raises(ConfigError, match=r"100001 positions are more than the target's \d+"):
        curves.measure(config, curves.Options((100_000,), (1,), (1,), 1), lambda _: None)
