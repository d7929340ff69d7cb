"""Workers built from a configuration, on a tiny real model."""

from pathlib import Path

import pytest
import torch
from worker_messages import Part, opened, plan, verify, with_drafts

from specserve import drafting, folders
from specserve.config import Config, DraftConfig, EngineConfig, parse
from specserve.drafting import worker
from specserve.errors import ConfigError
from specserve.transport.messages import Push, Verdict
from specserve.verification import verifier

VOCAB = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of a few thousand weights whose head is wider than its tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, "w0")).save(str(folder / "tokenizer.json"))
    return folder


def config(folder: Path, **draft) -> Config:
    model = {"source": str(folder), "device": "cpu", "kv_blocks": 32}
    return parse(
        {"target": model, "draft": {"model": model, **draft}, "engine": {"block_tokens": 4, "max_requests": 4}}
    )


@pytest.mark.parametrize("dist", ["sparse", "dense"])
def test_both_workers_are_built_and_speak_to_each_other(tiny: Path, dist: str) -> None:
    """Built from one folder, draft and target agree on dists: nearly every drafted token is kept."""
    settings = config(tiny, dist=dist)
    drafter, draft = worker.build(settings)
    target_worker, target = verifier.build(settings)
    assert (draft.role, target.role) == ("draft", "target")
    assert (target.blocks, target.block_tokens, target.context_length, target.vocab_size) == (32, 4, 64, VOCAB)
    assert target.weights_bytes > 0
    parts = [Part(r, 0, [1 + r, 2, 3], range(4 * r, 4 * r + 4), slots=range(4 * r, 4 * r + 4)) for r in range(4)]
    for row in range(4):
        drafter.handle(opened(row, seed=row))
        target_worker.handle(opened(row, seed=row))
    (push,) = drafter.handle(plan(parts))
    assert isinstance(push, Push), push
    (verdict,) = target_worker.handle(verify(with_drafts(parts, push), push.dists))
    assert isinstance(verdict, Verdict), verdict
    assert push.tokens.max() < VOCAB
    assert verdict.kept.sum() >= 14


def test_speculators_say_where_they_live() -> None:
    """A model speculator needs a worker, a guesser none; `none` needs nothing; others are refused by name."""
    assert drafting.has_worker(DraftConfig(speculator="small_model"))
    assert drafting.guesser_of(DraftConfig(speculator="small_model")) is None
    assert not drafting.has_worker(DraftConfig(speculator="ngram"))
    assert drafting.guesser_of(DraftConfig(speculator="ngram")) is not None
    assert not drafting.has_worker(DraftConfig(speculator="none"))
    assert drafting.guesser_of(DraftConfig(speculator="none")) is None
    with pytest.raises(ConfigError, match="ngram"):
        drafting.has_worker(DraftConfig(speculator="oracle"))


def test_the_folders_hold_the_documented_choices() -> None:
    """Workers and helpers are no choices; every rule and speculator has its constants."""
    assert folders.names_in("drafting") == ["eagle", "mtp", "ngram", "prediction", "small_model", "suffix"]
    lossless = {"block", "coupled", "exact", "rejection"}
    assert set(folders.names_in("verification")) == lossless | {"synthetic", "typical"}
    for name in folders.names_in("verification"):
        rule = folders.load("verification", name)
        assert rule.DRAFT_PICKS in ("sampling", "argmax", "shared_noise")
        assert rule.NEEDS_DISTS is (name in {"block", "rejection"})
        assert rule.LOSSLESS is (name in lossless)
        assert rule.GREEDY_WALK is (name != "synthetic")
    assert worker.draft_picks()["coupled"] == "shared_noise"


def test_a_verifier_says_which_rules_it_has(tiny: Path) -> None:
    """Rules that need a configuration are there when they have it; a lossy one says so."""
    plain = {"block": True, "coupled": True, "exact": True, "rejection": True, "typical": False}
    assert verifier.build(config(tiny))[1].rules == plain
    made_up = config(tiny).model_copy(update={"engine": EngineConfig(synthetic_acceptance=(0.5,), block_tokens=4)})
    assert verifier.build(made_up)[1].rules == plain | {"synthetic": False}
    with pytest.raises(ConfigError, match="no rule called 'guess'"):
        verifier.build(made_up.model_copy(update={"engine": EngineConfig(rule="guess", block_tokens=4)}))
    with pytest.raises(ConfigError, match="synthetic_acceptance"):
        parse({"engine": {"rule": "synthetic"}})
    with pytest.raises(ConfigError, match="never rise"):
        parse({"engine": {"synthetic_acceptance": [0.2, 0.4]}})
