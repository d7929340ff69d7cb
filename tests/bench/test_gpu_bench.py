"""The script for one GPU, run on the CPU at tiny size: the same code, without Ray, and checks that can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from specserve.bench import gpu, gpu_checks, gpu_rounding
from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.models._float8 import Float8Product
from specserve.models._int8_digits import Int8Digits
from specserve.models._static_plan import StaticInputs
from specserve.models._static_states import StaticStates
from specserve.models._static_trees import StaticTrees
from specserve.models.eagle import EagleHead
from specserve.models.paged_transformers import PagedTransformers
from specserve.verification import all_rules, judges_of

CPU = torch.device("cpu")

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # importing it fails from now on
from specserve.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_everything_runs_without_ray(tmp_path) -> None:
    """All checks hold, every step is timed for every number of rows, every mode gives tokens; all of it is in JSON."""
    path = tmp_path / "gpu.json"
    arguments = ["bench", "gpu", "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--rows", "1,3"]
    arguments += ["--depth", "2", "--context", "40", "--repeats", "1", "--max-tokens", "8", "--json", str(path)]
    environment = os.environ | {"SPECSERVE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", WITHOUT_RAY, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(path.read_text())["rows"]
    facts = [row for row in rows if "check" in row]
    assert {row["holds"] for row in facts} == {"yes"}
    names = " ".join(row["check"] for row in facts)
    assert "greedy tokens" in names
    assert "noise" in names
    assert all(f"rule {name}:" in names for name in all_rules() if name != "synthetic")
    steps = {(row["case"], row["rows"]) for row in rows if "case" in row}
    cases = ("draft step", "plain decode", "verify depth 2")
    cases += tuple(f"{case}, recorded" for case in cases)
    rounded = [f"{case}, recorded, {each} weights" for case in cases[1:3] for each in ("int8", "fp8")]
    assert steps == {("copy", 0)} | {(case, count) for case in (*cases, *rounded) for count in (1, 3)}
    assert all(f"{each} model: logits from those written out" in names for each in ("int8", "fp8"))
    assert "greedy tokens of recorded steps as of eager ones" in names
    assert "largest difference of logits, trees" in names
    assert "largest difference of logits and states, a head" in names
    assert all(f"steps of the {role} that were recorded" in names for role in ("target", "draft"))
    modes = {(row["mode"], row["requests"]): row for row in rows if "mode" in row}
    assert set(modes) == {(mode, count) for mode in ("plain", "serial", "ahead") for count in (1, 3)}
    assert all(row["tokens_per_s"] > 0 for row in modes.values())
    assert modes["plain", 3]["tokens_per_round"] == 1 < modes["serial", 3]["tokens_per_round"]


def test_recorded_steps_that_go_wrong_are_found(monkeypatch) -> None:
    """Positions that are off by one, padding that reads another row's pages, and a model that cannot be recorded."""

    def found() -> dict[str, str]:
        made = gpu_checks._same_recorded(
            CPU, lambda where: gpu._Model.random(gpu.SHAPES["tiny"]["target"], torch.float32, where).backend
        )
        return {row["check"]: row["holds"] for row in made}

    assert set(found().values()) == {"yes"}
    fill = StaticInputs.fill

    def shifted(self, batch, null_block):
        fill(self, batch, null_block)
        self.starts[: len(batch.offsets) - 1] += 1

    def in_block_0(self, batch, null_block):
        fill(self, batch, 0)
        self.lengths.clamp_(min=1)

    for wrong in (shifted, in_block_0):
        monkeypatch.setattr(StaticInputs, "fill", wrong)
        assert "NO" in found().values()
    monkeypatch.undo()
    compute = PagedTransformers._compute
    monkeypatch.setattr(PagedTransformers, "_compute", lambda *parts: compute(*parts) * bool(parts[1].any()))
    assert [(name[:20], holds) for name, holds in found().items()] == [("steps are recorded: ", "NO")]


@pytest.mark.parametrize("bytes_are_kept", [False, True])
def test_rounded_weights_hold(bytes_are_kept: bool, monkeypatch) -> None:
    """Written out, and with the layers that a GPU would run."""
    if bytes_are_kept:
        for kind in (Int8Digits, Float8Product):
            monkeypatch.setattr(kind, "serves", staticmethod(lambda dtype, device: dtype == torch.bfloat16))
    found = list(gpu_rounding.checks(CPU, gpu.tiny_rounded))
    assert len(found) == 8
    assert {each["holds"] for each in found} == {"yes"}


@pytest.mark.parametrize("kind", [Int8Digits, Float8Product])
def test_wrong_products_are_found(kind, monkeypatch) -> None:
    """Scales of another output, a scale for all rows together, and a digit or a bias that is lost."""
    forward = kind.forward

    def broken(lose) -> set[str]:
        monkeypatch.setattr(kind, "serves", staticmethod(lambda dtype, device: dtype == torch.bfloat16))
        monkeypatch.setattr(kind, "forward", lose)
        found = {each["holds"] for each in gpu_rounding.checks(CPU, gpu.tiny_rounded)}
        monkeypatch.undo()
        return found

    def shifted_scales(self, rows):
        right, self.scales = self.scales, self.scales.roll(1, -1)
        try:
            return forward(self, rows)
        finally:
            self.scales = right

    def one_scale(self, rows):
        largest = rows.abs().max()
        return forward(self, (rows / largest * 127).round() * largest / 127)

    def without_bias(self, rows):
        found = forward(self, rows)
        return found if self.bias is None else found - self.bias.to(rows.dtype)

    assert broken(forward) == {"yes"}
    for wrong in (shifted_scales, one_scale, without_bias):
        assert "NO" in broken(wrong)


def test_a_card_without_a_product_of_bytes_says_so(monkeypatch) -> None:
    """And holds, since weights are written out there."""
    monkeypatch.setattr(gpu_rounding, "from_the_rounded_model", lambda *_: (0.0, 0))
    found = list(gpu_rounding.checks(torch.device("meta"), gpu.tiny_rounded))
    assert [each["holds"] for each in found] == ["yes"] * 6
    assert found[3]["check"] == "fp8 products: not there on this device, so weights are written out"


def test_a_target_that_cannot_run_rounded_is_a_fact(monkeypatch) -> None:
    """And what comes behind it is still measured."""

    def fails(*_: object) -> None:
        raise RuntimeError("no such product")

    monkeypatch.setattr(gpu._rounded_layers, "round_weights", fails)
    options = gpu.Options(shape="tiny", dtype="float32", rows=(1,), depths=(1,))
    facts, steps = gpu._rounded("fp8", options, CPU, 1.0, lambda _: None)
    assert [(each["check"], each["holds"]) for each in facts] == [
        ("steps of the target, recorded, fp8 weights: no such product", "NO")
    ]
    assert not steps


def test_recorded_trees_that_go_wrong_are_found(monkeypatch) -> None:
    """Paths that stay those of the trees before, and a model whose steps with trees cannot be recorded."""

    def found() -> dict[str, str]:
        made = gpu_checks._same_trees(
            CPU, lambda where: gpu._Model.random(gpu.SHAPES["tiny"]["target"], torch.float32, where).backend
        )
        return {row["check"]: row["holds"] for row in made}

    assert set(found().values()) == {"yes"}
    monkeypatch.setattr(StaticTrees, "fill", lambda *_: None)
    assert found() == {"largest difference of logits, trees": "NO", "steps with trees replayed": "yes"}
    monkeypatch.undo()
    compute = PagedTransformers._compute
    monkeypatch.setattr(PagedTransformers, "_compute", lambda *parts: compute(*parts) * bool(parts[1].any()))
    assert [(name[:31], holds) for name, holds in found().items()] == [("steps with trees are recorded: ", "NO")]


def test_recorded_heads_that_go_wrong_are_found(monkeypatch) -> None:
    """States that go to other tokens, origins that stay, and a head that cannot be recorded."""

    def found() -> dict[str, str]:
        return {row["check"]: row["holds"] for row in gpu_checks._same_head(CPU)}

    assert set(found().values()) == {"yes"}
    fill = StaticStates.fill

    def turned_round(self, flat, origins):
        fill(self, flat[::-1], origins)

    def without_origins(self, flat, origins):
        fill(self, flat, 0 * origins)

    for wrong in (turned_round, without_origins):
        monkeypatch.setattr(StaticStates, "fill", wrong)
        assert found() == {"largest difference of logits and states, a head": "NO", "steps of a head replayed": "yes"}
    monkeypatch.undo()
    compute = EagleHead._compute

    def looking(self, tokens, *others):
        logits, states = compute(self, tokens, *others)
        return logits * bool(tokens.any()), states

    monkeypatch.setattr(EagleHead, "_compute", looking)
    assert [(name[:29], holds) for name, holds in found().items()] == [("steps of a head are recorded:", "NO")]


def test_a_rule_without_its_law_is_found() -> None:
    """Keeping every drafted token, or choosing after a refusal by the draft's dist, is far from the target's law."""
    judge = judges_of(EngineConfig())["rejection"]
    assert gpu_checks.enumerated_distance(judge, CPU) < 4 / 200

    def keeps_all(target, draft, tokens, lengths, noise):
        return lengths, judge(target, draft, tokens, lengths, noise)[1]

    def ignores_the_target(target, draft, tokens, lengths, noise):
        kept, following = judge(target, draft, tokens, lengths, noise)
        return kept, torch.where(kept < lengths, tokens[:, 0], following)

    assert gpu_checks.enumerated_distance(keeps_all, CPU) > 0.1
    assert gpu_checks.enumerated_distance(ignores_the_target, CPU) > 0.1


def test_noise_of_other_integers_is_found(monkeypatch) -> None:
    """A shift that drags the sign along, as signed numbers have it, changes half of all bits."""
    assert gpu_checks.differing_noise(CPU) == 0
    monkeypatch.setattr("specserve.sampling.noise._shifted", lambda x, bits: x >> bits)
    assert gpu_checks.differing_noise(CPU) > 100_000


@pytest.mark.parametrize("wrong", [{"shape": "huge"}, {"rows": (0,)}, {"depths": (0,)}, {"max_tokens": 1}])
def test_what_cannot_be_run_is_refused(wrong) -> None:
    """Before anything is made."""
    with pytest.raises(ConfigError):
        gpu.measure(gpu.Options(**wrong), lambda _: None)
