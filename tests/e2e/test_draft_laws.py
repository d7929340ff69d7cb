"""Behind draft heads, and drafts with another vocabulary, answers have exactly the target's law under every rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny_heads
from test_distribution import joint_law, p_value, sample
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

from specserve.config import parse
from specserve.errors import ConfigError
from specserve.local import LocalEngine

WORDS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that knows three words."""
    return tiny_heads.few_words(tmp_path_factory.mktemp("target"), WORDS, layers=3)


def config(target: Path, head: Path, speculator: str = "eagle", vocabulary: str = "same", **engine):
    model = {"device": "cpu", "kv_blocks": 512, "context_length": 64}
    limits = {"depth": 3, "block_tokens": 4, "max_requests": 64, "max_batch_tokens": 512, "queue_limit": 4096}
    return parse(
        {
            "target": {"source": str(target), **model},
            "draft": {"speculator": speculator, "model": {"source": str(head), **model, "vocabulary": vocabulary}},
            "engine": limits | engine,
        }
    )


HEADS = {
    "eagle": lambda folder: tiny_heads.eagle(folder, vocab_size=WORDS),
    "eagle3": lambda folder: tiny_heads.eagle3(folder, vocab_size=WORDS, read=(0, 1, 2), spoken=2),
}


def other_words(folder: Path) -> Path:
    """A random Llama that knows two of the target's words, by other numbers, and one more."""
    tiny_heads.few_words(folder, WORDS, layers=1, seed=5)
    Tokenizer(WordLevel({"w2": 0, "other": 1, "w0": 2}, "w2")).save(str(folder / "tokenizer.json"))
    return folder


def pair(target: Path, kind: str, folder: Path, **engine):
    """The configuration of the target and a draft of this kind."""
    if kind == "intersection":
        return config(target, other_words(folder), "small_model", kind, outcomes=0, **engine)
    return config(target, HEADS[kind](folder), **engine)


KINDS = [*HEADS, "intersection"]
RULES = ["rejection", "block", "coupled", "exact"]


@pytest.mark.parametrize(
    ("kind", "rule", "count"),
    [
        *((kind, "rejection", 2_500) for kind in KINDS),
        *(pytest.param(kind, rule, 20_000, marks=pytest.mark.full) for kind in KINDS for rule in RULES),
    ],
)
def test_sampled_continuations_have_the_targets_law(target: Path, tmp_path: Path, kind: str, rule: str, count: int):
    """243 cells, 64 requests at once, depth 3; the same numbers do not fit another target's law."""
    law, other = (
        joint_law(AutoModelForCausalLM.from_pretrained(folder).eval())
        for folder in (target, tiny_heads.few_words(tmp_path / "other", WORDS, layers=3, seed=2))
    )
    with LocalEngine(pair(target, kind, tmp_path / "draft", rule=rule)) as running:
        found = sample(running, count, depth=3)
        told = running.metrics_text()
        assert running.levels().slots_held == 0
    assert sum(found.values()) == count
    assert p_value(found, law, count) > 1e-3
    assert p_value(found, other, count) < 1e-9
    (kept,) = re.findall(r"^specserve_spec_decode_num_accepted_tokens_total\S* (\S+)", told, re.MULTILINE)
    assert float(kept) > count / 4


def test_a_head_cannot_draft_ahead_of_a_verdict(target: Path, tmp_path: Path) -> None:
    """Outcomes above 0 are refused at start, in words; `auto` means 0."""
    head = HEADS["eagle"](tmp_path / "head")
    with pytest.raises(ConfigError, match=r"set engine\.outcomes to 0 or auto"):
        LocalEngine(config(target, head, outcomes=1))
    with LocalEngine(config(target, head, outcomes="auto")) as running:
        assert len(running.generate([[0, 1]], max_tokens=4, ignore_eos=True)[0].tokens) == 4
