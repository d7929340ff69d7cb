"""Folders with tiny random Llama models that share a tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_tokenizer import byte_level, write_folder
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(folder: Path, *, seed: int, layers: int = 2, context: int = 512) -> Path:
    """A random Llama of a few hundred thousand weights with the byte-level tokenizer."""
    core = byte_level()
    write_folder(folder, core)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=core.get_vocab_size(with_added_tokens=True),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def equal_pair(base: Path, **model: object) -> dict[str, dict]:
    """Target and draft sections of a configuration: two equal tiny models below a folder, so that drafts are kept."""
    target, draft = (str(tiny_llama(base / role, seed=1)) for role in ("target", "draft"))
    return {"target": model | {"source": target}, "draft": {"model": model | {"source": draft}}}
