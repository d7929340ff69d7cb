"""Targets with tiny random multi-token-prediction heads in their checkpoints, in the layouts in which they come."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_heads
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import HEAD_DIM, KV_HEADS, WIDTH
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

LAYERS = 3
Head = dict[str, torch.Tensor]
"""enorm, hnorm and norm [WIDTH], eh_proj [WIDTH, 2 WIDTH], and a Llama layer's weights from `block.` on."""


def heads(count: int, seed: int = 5) -> list[Head]:
    """So many random heads."""
    random, found = tiny_heads._random(seed), []
    for _ in range(count):
        norms = {name: 1 + random(WIDTH) for name in ("enorm", "hnorm", "norm")}
        block = {"block.input_layernorm.weight": 1 + random(WIDTH)} | tiny_heads._layer("block.", random, WIDTH)
        found.append(norms | {"eh_proj": random(WIDTH, 2 * WIDTH, scale=0.3)} | block)
    return found


def _named(head: Head, joining: dict[str, str], block: str) -> Head:
    """The head's four own weights under other names, its layer's behind another prefix."""
    own = {f"{name}.weight": head[ours] for ours, name in joining.items()}
    layer = {name.removeprefix("block."): each for name, each in head.items() if name.startswith("block.")}
    return own | {f"{block}{name}": tensor for name, tensor in layer.items()}


def deepseek(given: list[Head], vocab_size: int, layers: int = LAYERS) -> Head:
    """DeepSeek-V3 and GLM-4: layers behind the target's last one, with copies of its embedding and output layer."""
    found: Head = {}
    for number, head in enumerate(given, layers):
        stem = f"model.layers.{number}."
        names = {"enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm", "eh_proj": "eh_proj"}
        found |= _named(head, {ours: stem + name for ours, name in names.items()}, stem)
        found[f"{stem}embed_tokens.weight"] = torch.zeros(vocab_size, WIDTH)
        found[f"{stem}shared_head.head.weight"] = torch.zeros(vocab_size, WIDTH)
    return found


def qwen(given: list[Head], vocab_size: int) -> Head:
    """Qwen3-Next: one head, whose projection and norms stand above its layer."""
    del vocab_size
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm", "eh_proj": "fc"}
    return _named(given[0], {ours: f"mtp.{name}" for ours, name in names.items()}, "mtp.layers.0.")


def megatron(given: list[Head], vocab_size: int) -> Head:
    """Megatron: its own names for the parts of a layer, queries, keys and values as one matrix, gate and up as well."""
    del vocab_size
    found: Head = {}
    for number, head in enumerate(given):
        names = {"enorm": "enorm", "hnorm": "hnorm", "norm": "final_layernorm", "eh_proj": "eh_proj"}
        stem = f"mtp.layers.{number}."
        found |= {f"{stem}{name}.weight": head[ours] for ours, name in names.items()}
        found |= {f"{stem}transformer_layer.{name}": tensor for name, tensor in _megatron_layer(head).items()}
    return found


def _megatron_layer(head: Head) -> Head:
    query, key, value = (
        head[f"block.self_attn.{name}_proj.weight"].view(KV_HEADS, -1, HEAD_DIM, WIDTH) for name in "qkv"
    )
    return {
        "self_attention.linear_qkv.weight": torch.cat([query, key, value], 1).reshape(-1, WIDTH),
        "self_attention.linear_qkv.layer_norm_weight": head["block.input_layernorm.weight"],
        "self_attention.linear_proj.weight": head["block.self_attn.o_proj.weight"],
        "pre_mlp_layernorm.weight": head["block.post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([head["block.mlp.gate_proj.weight"], head["block.mlp.up_proj.weight"]]),
        "mlp.linear_fc2.weight": head["block.mlp.down_proj.weight"],
    }


LAYOUTS = {"deepseek": deepseek, "qwen": qwen, "megatron": megatron}


def add(folder: Path, weights: Head) -> Path:
    """Put these tensors into a target's folder, beside its own."""
    path = folder / "model.safetensors"
    both = load_file(path) | {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(both, path, {"format": "pt"})
    return folder


def target(folder: Path, layout: str, given: list[Head], *, vocab_size: int, seed: int = 1) -> Path:
    """A random Llama of few words with these heads in its folder."""
    tiny_heads.few_words(folder, vocab_size, layers=LAYERS, seed=seed)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"rms_norm_eps": 1e-5}))
    return add(folder, LAYOUTS[layout](given, vocab_size))


def gemma(folder: Path, *, vocab_size: int, layers: int = 4, width: int = 32, seed: int = 7, **told) -> Path:
    """A random Gemma 4 text model of few words, its layers sliding and full by turns."""
    torch.manual_seed(seed)
    config = Gemma4TextConfig(**_gemma_config(vocab_size, layers, width) | told)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return tiny_heads.words(folder, vocab_size)


def assistant(
    folder: Path, *, vocab_size: int, width: int = 24, target_width: int = 32, ordered: bool = False, **told
) -> Path:
    """A random head for such a target: two layers of queries only, in the layout of Gemma 4's assistants."""
    torch.manual_seed(8)
    text = _gemma_config(vocab_size, 2, width) | {"num_kv_shared_layers": 2} | told
    more = {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 2} if ordered else {}
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text).to_dict(), backbone_hidden_size=target_width, **more
    )
    model = Gemma4AssistantForCausalLM(config)
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(vocab_size))
    model.save_pretrained(folder)
    return folder


def _gemma_config(vocab_size: int, layers: int, width: int) -> dict:
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "sliding_window": 8,
        "max_position_embeddings": 512,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
