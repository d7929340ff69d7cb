"""Tiny random models of several families, and a cache of rows for driving a backend by hand."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
)

from specserve.models import RaggedBatch
from specserve.models.paged_transformers import PagedTransformers

VOCABULARY = 97
BLOCK = 4
BLOCKS = 40

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}

CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama_yarn": lambda: LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral_window": lambda: MistralConfig(**SMALL, sliding_window=5),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8),
    "phi3_longrope": lambda: Phi3Config(
        **SMALL, rope_parameters=LONGROPE, original_max_position_embeddings=8, resid_pdrop=0.0
    ),
    "gemma2_softcap": lambda: Gemma2Config(
        **SMALL, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        final_logit_softcapping=3.0,
    ),
}


def tiny(family: str) -> torch.nn.Module:
    """A random model in eval mode; eager attention, so that softcapping is in its own forward."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="eager")
    return model.eval().requires_grad_(False)


def paged(family: str, context_length: int | None = None) -> PagedTransformers:
    """A backend with the same weights as `tiny(family)`, its pages full of garbage."""
    backend = PagedTransformers(tiny(family), context_length)
    backend.allocate(BLOCKS, BLOCK)
    for pages in (backend._pages.keys, backend._pages.values):
        for layer in pages.values():
            layer.fill_(float("nan"))
    return backend


def own_logits(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    """The model's plain forward: [tokens, vocabulary]."""
    with torch.inference_mode():
        return model(torch.from_numpy(tokens)[None], use_cache=False).logits[0]


def ragged(rows: list[tuple[np.ndarray, int, list[int]]]) -> RaggedBatch:
    """A batch of (tokens, start, block table) rows that shows every logit."""
    lengths = [len(tokens) for tokens, _, _ in rows]
    tables = np.zeros((len(rows), max(len(table) for _, _, table in rows)), dtype=np.int32)
    for row, (_, _, table) in enumerate(rows):
        tables[row, : len(table)] = table
    return RaggedBatch(
        tokens=np.concatenate([tokens for tokens, _, _ in rows]),
        positions=np.concatenate([np.arange(start, start + len(tokens)) for tokens, start, _ in rows]),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        tables=tables,
        wanted=np.arange(sum(lengths)),
    )


def random_tokens(seed: int, count: int) -> np.ndarray:
    """int64 [count] ids above the special ones."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, count)
