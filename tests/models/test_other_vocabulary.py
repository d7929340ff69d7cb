"""A draft with another tokenizer: which tokens are the same, what it reads and says, and whose law answers have."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_heads
import torch
from tiny_causal import BLOCK, paged, ragged
from tiny_tokenizer import byte_fallback, byte_level, write_folder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specserve.check import report
from specserve.config import parse
from specserve.drafting import worker
from specserve.errors import ConfigError
from specserve.local import LocalEngine
from specserve.models import _other_vocabulary
from specserve.models.other_vocabulary import OtherVocabulary
from specserve.models.vocabulary import token_ids


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that are put together live as long as the test."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))


def words(folder: Path, names: list[str], *, seed: int) -> Path:
    """A random Llama whose tokenizer knows these words."""
    tiny_heads.few_words(folder, len(names), layers=1, seed=seed)
    Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, names[0])).save(str(folder / "tokenizer.json"))
    return folder


def config(target: Path, draft: Path, **engine):
    model = {"device": "cpu", "kv_blocks": 512, "context_length": 64}
    limits = {"depth": 3, "block_tokens": 4, "max_requests": 64, "max_batch_tokens": 512, "queue_limit": 4096}
    return parse(
        {
            "target": {"source": str(target), **model},
            "draft": {"model": {"source": str(draft), "vocabulary": "intersection", **model}},
            "engine": limits | {"outcomes": 0} | engine,
        }
    )


def test_tokens_are_the_same_where_they_spell_the_same(tmp_path: Path) -> None:
    """Byte-level and word-mark tokenizers share letters, a space, and a word behind a space; no special token."""
    target, draft = write_folder(tmp_path / "target", byte_level()), write_folder(tmp_path / "draft", byte_fallback())
    theirs, own = token_ids(target), token_ids(draft)
    folder = _other_vocabulary.translated(draft, target, lambda _: None)
    read_as, target_ids, draft_ids = _other_vocabulary.read(folder)
    pairs = dict(zip(target_ids.tolist(), draft_ids.tolist(), strict=True))
    assert pairs[theirs["Ġ"]] == own["<0x20>"]
    assert pairs[theirs["q"]] == own["<0x71>"]
    assert pairs[theirs["th"]] == own["th"] if "th" in theirs else True
    assert pairs[theirs["Ġth"]] == own["▁th"] if "Ġth" in theirs else True
    assert theirs["<|end|>"] not in pairs
    assert read_as[theirs["<|end|>"]] == own["<unk>"]
    assert all(read_as[token] == pairs.get(token, own["<unk>"]) for token in range(len(read_as)))
    assert token_ids(folder) == theirs


def test_a_model_reads_and_says_the_other_ones_tokens() -> None:
    """Logits are the model's own where ids are shared, behind what it reads instead of the others; −∞ elsewhere."""
    read_as, target_ids, draft_ids = torch.tensor([5, 9, 3, 3, 7]), torch.tensor([0, 1, 4]), torch.tensor([5, 9, 7])
    other = OtherVocabulary(paged("llama"), read_as, target_ids, draft_ids)
    table = list(range(BLOCK))
    found = other.forward(ragged([(torch.tensor([4, 2, 0, 3]).numpy(), 0, table)]))
    own = paged("llama").forward(ragged([(torch.tensor([7, 3, 5, 3]).numpy(), 0, table)]))
    assert found.shape == (4, 5)
    assert torch.equal(found[:, target_ids], own[:, draft_ids])
    assert (found[:, [2, 3]] == -torch.inf).all()


def test_greedy_answers_are_the_targets_own(tmp_path: Path) -> None:
    """Half of the words are shared, under other ids; drafts are made and kept, and never a word that is not shared."""
    target = words(tmp_path / "target", ["a", "b", "c", "d", "e", "f"], seed=1)
    draft = words(tmp_path / "draft", ["x", "d", "b", "y", "a"], seed=2)
    with LocalEngine(config(target, draft)) as engine:
        prompts = [[0, 4, 5, 1], [3, 2], [5]]
        answers = engine.generate(prompts, max_tokens=30, ignore_eos=True)
        plain = engine.generate(prompts, max_tokens=30, ignore_eos=True, depth=0)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert sum(answer.stats.drafted_tokens for answer in answers) > 50
    assert sum(answer.stats.kept_tokens for answer in answers) > 0


def test_the_same_tokenizer_needs_no_translation(tmp_path: Path) -> None:
    """The draft's own folder is served."""
    target = words(tmp_path / "target", ["a", "b", "c"], seed=1)
    assert _other_vocabulary.translated(target, target, lambda _: None) == target


def test_tokenizers_that_share_nothing_are_refused(tmp_path: Path) -> None:
    """In words, at start; and without leave another tokenizer is refused as ever, with a hint."""
    target = words(tmp_path / "target", ["a", "b", "c"], seed=1)
    with pytest.raises(ConfigError, match="no token in common"):
        worker.build(config(target, words(tmp_path / "strange", ["x", "y"], seed=2)))
    draft = words(tmp_path / "draft", ["b", "a"], seed=2)
    same = config(target, draft).model_dump()
    same["draft"]["model"]["vocabulary"] = "same"
    with pytest.raises(ConfigError, match=r"set draft\.model\.vocabulary to intersection"):
        LocalEngine(parse(same))


def test_check_tells_what_they_share(tmp_path: Path) -> None:
    """`specserve check` finds no problem with such a pair."""
    target = words(tmp_path / "target", ["a", "b", "c", "d"], seed=1)
    findings = report(config(target, words(tmp_path / "draft", ["b", "a"], seed=2)))
    assert not [finding for finding in findings if finding.problem and finding.topic != "port"]
