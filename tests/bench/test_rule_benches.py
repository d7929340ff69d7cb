"""The benches of rules, on small inputs: what they report is what was asked for."""

from __future__ import annotations

import json

import pytest
from tiny_models import tiny_llama

from specserve.bench import acceptance, rules, speculators, ties
from specserve.cli import main
from specserve.config import parse
from specserve.errors import ConfigError
from specserve.models import _panels
from specserve.verification import all_rules


def test_each_rule_is_timed_against_a_read_of_the_logits(tmp_path, capsys) -> None:
    """Every rule and combination has a row; the ratio is that of its two times; the JSON holds the same rows."""
    path = tmp_path / "rules.json"
    arguments = ["--batch", "1,2", "--depth", "1", "--vocab", "500", "--repeats", "1", "--json", str(path)]
    assert main(["bench", "rules", *arguments]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {(row["rule"], row["batch"]) for row in rows} == {(n, b) for n in [*all_rules(), "process"] for b in (1, 2)}
    for row in rows:
        assert set(row) == {"rule", "batch", "depth", "vocab", "ms", "read_ms", "ratio"}
        assert row["ratio"] == pytest.approx(row["ms"] / row["read_ms"])
    assert "coupled" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [{"batch": (0,)}, {"depth": (1, 0)}, {"vocab": (10,)}, {"repeats": 0}])
def test_sizes_that_cannot_be_run_are_refused(wrong) -> None:
    """Nothing is measured for sizes below the least."""
    with pytest.raises(ConfigError, match="take numbers"):
        rules.measure(rules.Options(**wrong), lambda _: None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two tiny models, the draft another one than the target."""
    folders = [tiny_llama(tmp_path_factory.mktemp(name), seed=seed) for name, seed in (("target", 1), ("draft", 2))]
    models = [{"source": str(folder), "device": "cpu", "kv_blocks": 1000} for folder in folders]
    return parse({"target": models[0], "draft": {"model": models[1]}, "engine": {"max_requests": 4}})


def test_acceptance_is_measured_for_each_rule_and_temperature(pair) -> None:
    """Rules agree at temperature 0; a lossy one is marked; tokens per round lie between 1 and depth + 1."""
    options = acceptance.Options(temperatures=(0.0, 1.0), depth=2, prompts=2, max_tokens=6)
    rows = acceptance.measure(pair, options, lambda _: None)
    assert len(rows) == 2 * (len(all_rules()) - 1)
    assert {row["rule"] for row in rows if row["lossless"] == "NO"} == {"typical"}
    assert len({row["first_position"] for row in rows if row["temperature"] == 0}) == 1
    assert all(1 <= row["tokens_per_round"] <= 3 and 0 <= row["first_position"] <= 1 for row in rows)
    with pytest.raises(ConfigError, match="no rule called"):
        acceptance.measure(pair, acceptance.Options(rules=("guess",)), lambda _: None)


def test_shapes_are_compared_position_by_position(pair, monkeypatch) -> None:
    """All shapes report as many positions as there are, and torch's logits that differ by rounding, or not at all."""
    monkeypatch.setattr(_panels, "kernels", lambda: None)  # they give the same bits in any shape
    rows = ties.measure(pair, 80, lambda _: None)
    assert [row["positions"] for row in rows] == [80] * 4
    assert [row["bit_equal_rows"] for row in rows if row["target"] == "batch-invariant"] == [80, 80]
    rows = [row for row in rows if row["target"] == "ordinary"]
    assert all(row["bit_equal_rows"] < 80 for row in rows)
    assert all(row["largest_logit_difference"] < 1e-3 for row in rows)
    assert all(0 < row["expected_greedy_flips_per_million"] < 1000 for row in rows)
    assert all(row["greedy_flips"] <= 80 - row["bit_equal_rows"] for row in rows)


def test_speculators_are_measured_by_kind_of_prompt(pair) -> None:
    """A row for each speculator, kind and temperature, with shares of what was kept; unknown words are refused."""
    options = speculators.Options(speculators=("small_model", "suffix"), kinds=("chat", "code"), depth=2, prompts=2)
    rows = speculators.measure(pair, options, lambda _: None)
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert 1 <= row["tokens_per_round"] <= 3
        reached = row["kept_1"] * (1 + (row["kept_2"] or 0))
        assert row["tokens_per_round"] == pytest.approx(1 + reached)
    for wrong in ({"kinds": ("poems",)}, {"speculators": ("guess",)}, {"depth": 0}, {"max_tokens": 1}):
        with pytest.raises(ConfigError):
            speculators.measure(pair, speculators.Options(**wrong), lambda _: None)
