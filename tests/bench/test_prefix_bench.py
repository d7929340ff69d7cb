"""The bench of the prefix cache, on a tiny pair: what was warm was cached, and every case has a row."""

from __future__ import annotations

import json

import pytest
from tiny_models import tiny_llama

from specserve.bench import prefix
from specserve.cli import main
from specserve.config import Config
from specserve.errors import ConfigError


def test_cold_warm_and_stalls_are_reported(tmp_path_factory, tmp_path, capsys) -> None:
    """Full blocks of the shared beginning were cached in the warm case only; gaps belong to the stalls."""
    target, draft = (tiny_llama(tmp_path_factory.mktemp(name), seed=seed) for name, seed in (("t", 1), ("d", 2)))
    path = tmp_path / "prefix.json"
    arguments = ["--target", str(target), "--draft", str(draft), "--set", "target.device=cpu"]
    arguments += [
        "--set",
        "draft.model.device=cpu",
        "--set",
        "target.kv_blocks=200",
        "--set",
        "draft.model.kv_blocks=200",
    ]
    arguments += ["--prefix", "100", "--repeats", "2", "--budgets", "8,64", "--json", str(path)]
    assert main(["bench", "prefix", *arguments]) == 0
    cold, warm, *stalls = json.loads(path.read_text())["rows"]
    assert [cold["cached_tokens"], warm["cached_tokens"]] == [0, 96]
    assert cold["times_faster"] == 1
    assert warm["times_faster"] == pytest.approx(cold["first_token_ms"] / warm["first_token_ms"])
    assert [row["case"] for row in stalls] == ["beside an answer, budget 8", "beside an answer, budget 64"]
    assert all(row["usual_gap_ms"] > 0 and row["longest_gap_ms"] > 0 for row in stalls)
    assert "warm" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [{"prefix": 0}, {"repeats": 0}, {"budgets": (4, 0)}])
def test_what_cannot_be_run_is_refused(wrong) -> None:
    """Nothing is loaded for it."""
    with pytest.raises(ConfigError, match="take numbers from 1"):
        prefix.measure(Config(), prefix.Options(**wrong), lambda _: None)
