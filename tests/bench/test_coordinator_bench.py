"""The bench of the coordinator's own cost: it runs what it says, and reports what was asked for."""

from __future__ import annotations

import json

import pytest

from specserve.bench import coordinator
from specserve.cli import main
from specserve.errors import ConfigError
from specserve.transport.messages import Plan, PlanAhead


def test_every_combination_has_a_row_with_its_bound(tmp_path, capsys):
    """Modes, temperatures and batches; limits as stated; the JSON holds the same rows."""
    path = tmp_path / "coordinator.json"
    arguments = ["--modes", "plain,ahead12", "--batch", "1,3", "--context", "20", "--rounds", "3"]
    assert main(["bench", "coordinator", *arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]

    assert [(row["mode"], row["temperature"], row["batch"]) for row in rows] == [
        (mode, temperature, batch) for mode in ("plain", "ahead12") for temperature in (0, 1) for batch in (1, 3)
    ]
    assert [row["limit_ms"] for row in rows[:2]] == pytest.approx([0.52, 0.56])
    assert all(0 < row["critical_ms"] <= row["median_ms"] <= row["p90_ms"] for row in rows)
    assert "ahead12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "branches", "nodes"), [("plain", 0, 0), ("serial", 0, 4), ("ahead1", 1, 5), ("ahead12", 12, 72)]
)
def test_each_mode_does_what_it_says(monkeypatch, name, branches, nodes):
    """Plans are as deep and as wide as the mode, for most requests in most rounds; drafts are kept.

    Ahead, one token more than is offered is drafted in each branch.
    """
    plans = []
    real = coordinator._answers
    monkeypatch.setattr(
        coordinator, "_answers", lambda message, sampled: plans.append(message) or real(message, sampled)
    )
    drive = coordinator.Drive(coordinator.MODES[name], 1.0, 4, coordinator.Options(context=20, rounds=30))
    for _ in range(30):
        drive.round()
    engine = drive._engine
    planned = [plan for plan in plans if isinstance(plan, (Plan, PlanAhead)) and plan.depths.sum()]

    assert max((int(plan.depths.sum()) for plan in planned), default=0) == 4 * nodes
    counts = [plan.branch_counts.tolist() for plan in planned if isinstance(plan, PlanAhead)]
    assert max((max(each) for each in counts), default=0) == branches
    assert all(state.rounds >= 30 for state in engine._states.values())
    assert all((state.kept > 0) == (nodes > 0) for state in engine._states.values())
    engine.check()


def test_the_line_through_known_costs_is_found():
    """2 ms and 30 µs a request."""
    batch = (1, 16, 64, 256)
    assert coordinator._line(batch, [2 + 0.03 * n for n in batch]) == pytest.approx((2, 30))
    assert coordinator._line((4, 4), [1, 1]) == (None, None)


@pytest.mark.parametrize("wrong", [{"modes": ("fast",)}, {"batch": (0,)}, {"context": 0}, {"rounds": 1}])
def test_what_cannot_be_run_is_refused(wrong):
    """Nothing is measured for unknown modes or sizes below the least."""
    with pytest.raises(ConfigError):
        coordinator.measure(coordinator.Options(**wrong), lambda _: None)
