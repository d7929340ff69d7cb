"""Behind multi-token-prediction heads answers have exactly the target's law, in both position modes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_mtp
from test_distribution import joint_law, p_value, sample
from transformers import AutoModelForCausalLM

from specserve.config import parse
from specserve.local import LocalEngine
from specserve.verification._beside import Beside

WORDS = 3
MODES = ["advancing", "constant"]
RULES = ["rejection", "block", "coupled", "exact"]


def made(folder: Path, mode: str, seed: int = 1) -> tuple[Path, str]:
    """A random target that knows three words, and where its heads are."""
    if mode == "constant":
        tiny_mtp.gemma(folder, vocab_size=WORDS, seed=seed)
        return folder, str(tiny_mtp.assistant(folder / "assistant", vocab_size=WORDS))
    return tiny_mtp.target(folder, "megatron", tiny_mtp.heads(2), vocab_size=WORDS, seed=seed), str(folder)


def config(target: Path, heads: str, rule: str):
    return parse(
        {
            "target": {"source": str(target), "device": "cpu", "kv_blocks": 768, "context_length": 64},
            "draft": {"speculator": "mtp", "model": {"source": heads}},
            "engine": {
                "depth": 3,
                "rule": rule,
                "block_tokens": 4,
                "max_requests": 64,
                "max_batch_tokens": 512,
                "queue_limit": 4096,
            },
        }
    )


@pytest.mark.parametrize(
    ("mode", "rule", "count"),
    [
        *(("advancing", rule, 2_500) for rule in ("rejection", "block", "coupled")),
        ("constant", "rejection", 2_500),
        *(pytest.param(mode, rule, 20_000, marks=pytest.mark.full) for mode in MODES for rule in RULES),
    ],
)
def test_sampled_continuations_have_the_targets_law(tmp_path: Path, mode: str, rule: str, count: int) -> None:
    """243 cells, 64 requests at once, depth 3; the same numbers do not fit another target's law."""
    target, heads = made(tmp_path / "target", mode)
    law, other = (
        joint_law(AutoModelForCausalLM.from_pretrained(folder).eval())
        for folder in (target, made(tmp_path / "other", mode, seed=2)[0])
    )
    with LocalEngine(config(target, heads, rule)) as running:
        found = sample(running, count, depth=3)
        told = running.metrics_text()
        assert running.levels().slots_held == 0
    assert sum(found.values()) == count
    assert p_value(found, law, count) > 1e-3
    assert p_value(found, other, count) < 1e-9
    (kept,) = re.findall(r"^specserve_spec_decode_num_accepted_tokens_total\S* (\S+)", told, re.MULTILINE)
    assert float(kept) > count / 4


def test_dists_of_another_step_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts whose chains come with the dists of other tokens: the law is lost, and the test above would see it."""
    draft = Beside.draft

    def shifted(self, *arguments):
        drafted = draft(self, *arguments)
        rows = drafted.dists.rows
        return replace(drafted, dists=replace(drafted.dists, rows=rows[::-1].copy()))

    monkeypatch.setattr(Beside, "draft", shifted)
    target, heads = made(tmp_path / "target", "advancing")
    law = joint_law(AutoModelForCausalLM.from_pretrained(target).eval())
    with LocalEngine(config(target, heads, "rejection")) as running:
        assert p_value(sample(running, 2_500, depth=3), law, 2_500) < 1e-6
