"""Behind draft heads, and drafts with another vocabulary, answers have exactly the target's law under every rule."""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path

import pytest
import tiny_heads
from draft_first import draft_first
from sizes_in_turn import sizes_in_turn
from test_distribution import joint_law, p_value, sample
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

from specserve.config import parse
from specserve.coordinator.worker_drafts import takes_turns
from specserve.drafting import worker as draft_workers
from specserve.local import LocalEngine, load_parts
from specserve.transport.local import ThreadChannel
from specserve.types import Request, RequestId, Sampling, WorkerInfo

WORDS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that knows three words."""
    return tiny_heads.few_words(tmp_path_factory.mktemp("target"), WORDS, layers=3)


def config(
    target: Path, head: Path, speculator: str = "eagle", vocabulary: str = "same", lookup: str = "none", **engine
):
    model = {"device": "cpu", "kv_blocks": 512, "context_length": 64}
    limits = {"depth": 3, "block_tokens": 4, "max_requests": 64, "max_batch_tokens": 512, "queue_limit": 4096}
    return parse(
        {
            "target": {"source": str(target), **model},
            "draft": {
                "speculator": speculator,
                "lookup": lookup,
                "model": {"source": str(head), **model, "vocabulary": vocabulary},
            },
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


@pytest.mark.parametrize(
    ("kind", "rule", "outcomes", "count"),
    [
        ("eagle", "rejection", 16, 2_500),
        *(
            pytest.param(kind, rule, outcomes, 20_000, marks=pytest.mark.full)
            for kind in HEADS
            for rule in RULES
            for outcomes in (1, 16)
        ),
    ],
)
def test_heads_ahead_of_verdicts_keep_the_targets_law(
    target: Path, tmp_path: Path, kind: str, rule: str, outcomes: int, count: int
):
    """The same where chains grew from the head's own states before the verdict was known."""
    law = joint_law(AutoModelForCausalLM.from_pretrained(target).eval())
    chosen = pair(target, kind, tmp_path / "draft", rule=rule, outcomes=outcomes)
    with LocalEngine(chosen, parts=draft_first(load_parts(chosen))) as running:
        found = sample(running, count, depth=3)
        told = running.metrics_text()
    assert p_value(found, law, count) > 1e-3
    (kept,) = re.findall(r"^specserve_spec_decode_num_accepted_tokens_total\S* (\S+)", told, re.MULTILINE)
    assert float(kept) > count / 20


@pytest.mark.parametrize(
    ("kind", "lookup", "outcomes", "count"),
    [
        pytest.param("eagle", "ngram", 0, 2_500, marks=pytest.mark.full),
        *(
            pytest.param(kind, lookup, outcomes, 20_000, marks=pytest.mark.full)
            for kind in HEADS
            for lookup in ("ngram", "suffix")
            for outcomes in (0, 16)
        ),
    ],
)
def test_lookup_beside_heads_keeps_the_targets_law(
    target: Path, tmp_path: Path, kind: str, lookup: str, outcomes: int, count: int
):
    """Which of both drafts is decided by lengths and averages, never by what would be drawn."""
    law = joint_law(AutoModelForCausalLM.from_pretrained(target).eval())
    chosen = config(target, HEADS[kind](tmp_path / "draft"), lookup=lookup, outcomes=outcomes)
    parts = load_parts(chosen)
    with LocalEngine(chosen, parts=draft_first(parts) if outcomes else parts) as running:
        found = sample(running, count, depth=3)
        assert running.levels().slots_held == 0
    assert p_value(found, law, count) > 1e-3


@pytest.mark.parametrize("count", [2_500, pytest.param(20_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("lookup", ["none", "ngram"])
def test_trees_of_a_head_of_every_size_keep_the_targets_law(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookup: str, count: int
):
    """0, 1, 2, … nodes in turn, with prompt lookup beside them and without."""
    law = joint_law(AutoModelForCausalLM.from_pretrained(target).eval())
    sizes_in_turn(monkeypatch)
    trees = {"tree": "dynamic", "tree_nodes": 6, "depth_policy": "adaptive"}
    with LocalEngine(config(target, HEADS["eagle"](tmp_path / "draft"), lookup=lookup, **trees)) as running:
        found = sample(running, count, depth=None)
        assert running.levels().slots_held == 0
    assert p_value(found, law, count) > 1e-3


@pytest.mark.parametrize("kind", HEADS)
def test_lookup_beside_heads_changes_no_text(target: Path, tmp_path: Path, kind: str) -> None:
    """Chains, ahead and not, and trees; both sources drafted."""
    head = HEADS[kind](tmp_path / "head")
    prompts = [[0, 1, 2] * 6, [2, 2, 1, 0] * 4, [1]]
    dynamic = {"tree": "dynamic", "tree_nodes": 6}
    adaptive = dynamic | {"depth_policy": "adaptive"}
    shapes = ({"outcomes": 0}, {"outcomes": 16}, {"tree": [2, 2, 1]}, dynamic, adaptive)
    with LocalEngine(config(target, head, depth=0, rule="coupled")) as running:
        wanted = {temperature: text_of(running, prompts, temperature) for temperature in (0.0, 1.0)}
    told = ""
    for shape in shapes:
        with LocalEngine(config(target, head, lookup="ngram", rule="coupled", **shape)) as running:
            for temperature, texts in wanted.items():
                assert text_of(running, prompts, temperature) == texts
            told += running.metrics_text()
            running._loop.call(running._engine.check).result()
    counts = re.findall(
        r'^specserve_spec_decode_source_draft_tokens_total\S*source="(\w+)"\S* (\S+)', told, re.MULTILINE
    )
    assert {source for source, count in counts if float(count) > 0} == {"ngram", "eagle"}


def text_of(running: LocalEngine, prompts, temperature: float) -> list[tuple[int, ...]]:
    """Answers to all prompts at once, each prompt asked for twice as one family."""
    requests = [
        Request(
            RequestId(f"{number}-{branch}"),
            tuple(prompt),
            12,
            Sampling(temperature),
            seed=number,
            branch=branch,
            family=f"f{number}",
            ignore_eos=True,
        )
        for number, prompt in enumerate(prompts)
        for branch in range(2)
    ]
    return [answer.tokens for answer in running.complete(requests)]


@pytest.mark.parametrize("kind", ["eagle", pytest.param("eagle3", marks=pytest.mark.full)])
def test_the_text_is_the_same_for_every_number_of_outcomes(target: Path, tmp_path: Path, kind: str) -> None:
    """Prompts in chunks, shared, too many for the KV: greedy text is the target's, seeded `coupled` text that of R = 0.

    A draft worker that is replaced amid its plans changes nothing either.
    """
    noise = random.Random(3)
    prompts = [[noise.randrange(WORDS) for _ in range(length)] for length in (1, 9, 17, 30, 30)]
    head, limits = HEADS[kind](tmp_path / "draft"), {"rule": "coupled", "prefill_chunk": 8, "max_requests": 6}
    small = {"kv_blocks": 26}  # of 4 positions: not all answers have room at once
    plain = config(target, head, **limits)
    plain = plain.model_copy(update={"target": plain.target.model_copy(update=small)})
    said = {}
    for outcomes in (0, 1, 16):
        chosen = plain.model_copy(update={"engine": plain.engine.model_copy(update={"outcomes": outcomes})})
        parts = load_parts(chosen)
        with LocalEngine(chosen, parts=draft_first(parts) if outcomes else parts) as running:
            for temperature in (0.0, 1.0):
                texts = text_of(running, prompts, temperature)
                assert said.setdefault(temperature, texts) == texts
            if outcomes:
                assert running._engine._drafts.hits > 0
                replacing = threading.Timer(0.05, replace_draft, [running, chosen])
                replacing.start()
                assert text_of(running, prompts, 1.0) == said[1.0]
                replacing.join()
                assert text_of(running, prompts, 0.0) == said[0.0]
            running._loop.call(running._engine.check).result()
    alone = config(target, head, depth=0)
    with LocalEngine(alone) as running:
        assert text_of(running, prompts, 0.0) == said[0.0]


def replace_draft(running: LocalEngine, chosen) -> None:
    """A new draft worker takes the place of the one that drafts now."""
    worker, info = draft_workers.build(chosen)

    def join() -> None:
        channel = ThreadChannel(worker, running._mailbox, "draft", life=1)
        running._channels.append(channel)
        running._engine.attach("draft", channel, 1, info)

    running._loop.call(join).result()


def test_a_head_drafts_ahead_of_verdicts_where_it_is_told_to(target: Path, tmp_path: Path) -> None:
    """A number of outcomes is obeyed; `auto` means none, wherever the head is."""
    head = HEADS["eagle"](tmp_path / "head")
    for outcomes, ahead in (("auto", False), (0, False), (1, True)):
        with LocalEngine(config(target, head, outcomes=outcomes)) as running:
            assert hasattr(running._engine._drafts, "hits") == ahead
    target_info, head_info = (
        WorkerInfo(role, role, 8, 4, 32, 96, 0, 0.0, place=role, reads_hidden=role == "draft")
        for role in ("target", "draft")
    )
    assert takes_turns(config(target, head, outcomes="auto").engine, target_info, head_info)
