"""At temperature 1 the answers have exactly the target's distribution, end to end through the engine."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_tokenizer import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.config import ModelConfig, parse
from specserve.drafting import small_model
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import SparseDists, Workspace
from specserve.local import LocalEngine, Parts
from specserve.models import paged_transformers
from specserve.text import Tokenizer
from specserve.types import Request, RequestId, Sampling, WorkerInfo
from specserve.verification.verifier import Verifier

pytestmark = pytest.mark.timeout(1200)  # 50,000 answers of a draft that is mostly wrong take minutes on a busy machine

VOCAB, LENGTH, PROMPT = 3, 5, (0, 2, 1, 1)
BLOCKS, BLOCK_TOKENS = 512, 4


def tiny_llama(folder, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.9,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def joint_law(model, temperature=1.0):
    """P(continuation) of every continuation of LENGTH tokens, float64 [VOCAB ** LENGTH], by the model's own forward."""
    continuations = list(itertools.product(range(VOCAB), repeat=LENGTH))
    ids = torch.tensor([list(PROMPT) + list(continuation) for continuation in continuations])
    with torch.inference_mode():
        logs = (model(ids).logits.double() / temperature).log_softmax(-1)
    begin = len(PROMPT) - 1
    steps = logs[:, begin : begin + LENGTH].gather(-1, ids[:, begin + 1 :, None]).squeeze(-1)
    return steps.sum(-1).exp().numpy()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    models = [tiny_llama(folder, seed) for folder, seed in zip(folders, (1, 2), strict=True)]
    return folders, models


def engine(folders, rule, **options):
    config = parse(
        {
            "engine": {
                "depth": 3,
                "rule": rule,
                "block_tokens": BLOCK_TOKENS,
                "max_requests": 64,
                "max_batch_tokens": 512,
                "queue_limit": 4096,
            }
            | options
        }
    )
    backends = [paged_transformers.build(ModelConfig(device="cpu"), folder) for folder in folders]
    for backend in backends:
        backend.allocate(BLOCKS, BLOCK_TOKENS)
    target, draft = (
        WorkerInfo(role, "cpu", BLOCKS, BLOCK_TOKENS, backend.context_length, VOCAB, 0, 0.0)
        for role, backend in zip(("target", "draft"), backends, strict=True)
    )
    slots = config.engine.slot_count
    speculator = small_model.build(config.draft, backends[1], VOCAB)
    store, adaptive = SparseDists(slots, VOCAB, backends[1].device), config.engine.depth_policy == "adaptive"
    workspace = Workspace(slots, store, backends[1].device, notes_sureness=adaptive)
    worker = DraftWorker(speculator, workspace, vocab_size=VOCAB, shape=config.engine.tree_shape)
    verifier = Verifier(backends[0], vocab_size=VOCAB, engine=config.engine)
    parts = Parts(verifier, target, worker, draft, None, Tokenizer(byte_level()))
    return LocalEngine(config, parts=parts)


def sample(engine, count, depth, temperature=1.0):
    """Continuations of `count` requests, all of them submitted at once, 64 running at a time."""
    found = Counter()
    for start in range(0, count, 2048):
        requests = [
            Request(
                RequestId(f"s{seed}"),
                PROMPT,
                LENGTH,
                Sampling(temperature=temperature),
                seed=seed,
                ignore_eos=True,
                depth=depth,
            )
            for seed in range(start, min(count, start + 2048))
        ]
        found.update(completion.tokens for completion in engine.complete(requests))
    return found


def p_value(found, law, count):
    """Pearson's chi-square over all cells; those expected fewer than 8 times are counted as one."""
    observed = np.array([found[cell] for cell in itertools.product(range(VOCAB), repeat=LENGTH)], dtype=float)
    expected = law * count
    small = expected < 8
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    return stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        ("rejection", 5_000),
        pytest.param("exact", 6_000, marks=pytest.mark.full),
        pytest.param("block", 6_000, marks=pytest.mark.full),
        pytest.param("coupled", 6_000, marks=pytest.mark.full),
        *(pytest.param(rule, 50_000, marks=pytest.mark.full) for rule in ("rejection", "exact", "block", "coupled")),
    ],
)
def test_sampled_continuations_have_the_targets_law(pair, rule, count):
    """243 cells, 64 requests at once, depth 3, a draft that is deliberately another model."""
    folders, models = pair
    law = joint_law(models[0])
    assert abs(law.sum() - 1) < 1e-9
    with engine(folders, rule) as running:
        found = sample(running, count, depth=3)
        assert running.levels().slots_held == 0

    assert sum(found.values()) == count
    assert p_value(found, law, count) > 1e-3
    # The same numbers must not fit the draft's law, or the test could not fail.
    assert p_value(found, joint_law(models[1]), count) < 1e-9
