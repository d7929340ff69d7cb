"""What `specserve bench rules` times."""

import json

import pytest
import torch

from specserve.bench import rules
from specserve.cli import main
from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.verification import judges_of


def test_every_rule_has_a_row_for_every_case(tmp_path, capsys, monkeypatch) -> None:
    """The command prints a table and writes it; a ratio is in units of the read of its own case."""
    monkeypatch.setattr(rules, "_MOST_COPIES", 2)
    path = tmp_path / "rules.json"
    sizes = ["--batch", "1,2", "--depth", "1,3", "--vocab", "64,200", "--repeats", "1"]
    assert main(["bench", "rules", *sizes, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    named = {(row["rule"], row["batch"], row["depth"], row["vocab"]) for row in rows}
    names = {"process", "rejection", "block", "exact", "coupled", "typical", "synthetic"}
    assert named == {(n, b, d, v) for n in names for b in (1, 2) for d in (1, 3) for v in (64, 200)}
    assert all(row["ratio"] == pytest.approx(row["ms"] / row["read_ms"]) for row in rows)
    assert "coupled" in capsys.readouterr().out


@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_rules_that_stop_at_a_refused_token_are_timed_on_chains_kept_whole(rule: str) -> None:
    """Otherwise their figure would be that of their first row."""
    one = rules._inputs(batch=5, depth=4, vocab=300, seed=1)
    kept, _ = judges_of(EngineConfig())[rule](one.target, one.draft, one.picks[rule], one.lengths, one.noise)
    assert torch.equal(kept, one.lengths)


@pytest.mark.parametrize("wrong", [{"batch": (0,)}, {"depth": (0,)}, {"repeats": 0}, {"vocab": (63,)}])
def test_what_cannot_be_run_is_refused(wrong) -> None:
    """Before anything is timed."""
    with pytest.raises(ConfigError, match="--vocab from 64"):
        rules.measure(rules.Options(**wrong), lambda _: None)
