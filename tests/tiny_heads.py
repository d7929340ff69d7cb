"""Folders with tiny random draft heads, in the layouts in which EAGLE and EAGLE-3 checkpoints are published."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16


def _config(folder: Path, architecture: str, vocab_size: int, **more) -> None:
    told = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))


def _random(seed: int):
    noise = torch.Generator().manual_seed(seed)
    return lambda *shape, scale=0.15: torch.randn(*shape, generator=noise) * scale


def _layer(prefix: str, random, read: int) -> dict[str, torch.Tensor]:
    """One Llama layer whose attention reads vectors of width `read`."""
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    weights = {f"{prefix}self_attn.{name}.weight": random(count, read) for name, count in rows.items()}
    return weights | {
        f"{prefix}self_attn.o_proj.weight": random(WIDTH, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": random(INNER, WIDTH),
        f"{prefix}mlp.up_proj.weight": random(INNER, WIDTH),
        f"{prefix}mlp.down_proj.weight": random(WIDTH, INNER),
        f"{prefix}post_attention_layernorm.weight": 1 + random(WIDTH),
    }


def eagle(folder: Path, *, vocab_size: int, seed: int = 3, layers: int = 1, own: bool = False) -> Path:
    """EAGLE: the target's embedding and head, or its own; fc with a bias."""
    random = _random(seed)
    weights = {"fc.weight": random(WIDTH, 2 * WIDTH), "fc.bias": random(WIDTH)}
    for layer in range(layers):
        weights |= _layer(f"layers.{layer}.", random, WIDTH)
        if layer:
            weights[f"layers.{layer}.input_layernorm.weight"] = 1 + random(WIDTH)
    if own:
        weights["embed_tokens.weight"] = random(vocab_size, WIDTH, scale=1.0)
        weights["lm_head.weight"] = random(vocab_size, WIDTH)
    _config(folder, "LlamaForCausalLMEagle", vocab_size)
    save_file(weights, folder / "model.safetensors")
    return folder


def eagle3(folder: Path, *, vocab_size: int, read: tuple[int, ...], spoken: int, seed: int = 4) -> Path:
    """EAGLE-3: states of several layers, a head for `spoken` of the ids; as .bin files hold it, in safetensors."""
    random = _random(seed)
    weights = {
        "fc.weight": random(WIDTH, len(read) * WIDTH),
        **_layer("midlayer.", random, 2 * WIDTH),
        "midlayer.hidden_norm.weight": 1 + random(WIDTH),
        "midlayer.input_layernorm.weight": 1 + random(WIDTH),
        "norm.weight": 1 + random(WIDTH),
        "lm_head.weight": random(spoken, WIDTH),
    }
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:spoken].sort().values
    weights["d2t"] = ids - torch.arange(spoken)
    weights["t2d"] = torch.isin(torch.arange(vocab_size), ids)
    told = {"draft_vocab_size": spoken, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(read)}}
    _config(folder, "LlamaForCausalLMEagle3", vocab_size, **told)
    save_file(weights, folder / "model.safetensors")
    return folder


def few_words(folder: Path, vocab_size: int, *, layers: int, seed: int = 1) -> Path:
    """A random Llama as wide as the heads, whose tokenizer knows the words w0, w1, …"""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return words(folder, vocab_size)


def words(folder: Path, vocab_size: int) -> Path:
    """Give a model's folder a tokenizer that knows the words w0, w1, …"""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, "w0")).save(str(folder / "tokenizer.json"))
    return folder
