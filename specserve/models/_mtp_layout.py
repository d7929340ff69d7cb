"""Serial multi-token-prediction heads (MTP; DeepSeek-V3, 2024) in a target's own checkpoint: which tensors they are.

What is read. H is the target's width, N the number of its layers, i counts heads from 0; any prefix such as `model.` or
`model.language_model.` is dropped. `<layer>` stands for what a layer of the target's own kind has, under its own names.

                    DeepSeek-V3, GLM-4       Qwen3-Next (one head)       Megatron
enorm     [H]       layers.N+i.enorm         mtp.pre_fc_norm_embedding   mtp.layers.i.enorm
hnorm     [H]       layers.N+i.hnorm         mtp.pre_fc_norm_hidden      mtp.layers.i.hnorm
eh_proj   [H, 2 H]  layers.N+i.eh_proj       mtp.fc                      mtp.layers.i.eh_proj
norm      [H]       layers.N+i.shared_head.norm   mtp.norm               mtp.layers.i.final_layernorm
block               layers.N+i.<layer>       mtp.layers.0.<layer>        mtp.layers.i.transformer_layer.<layer>

(all with `.weight`; eh_proj reads the embedding first, then the state). Megatron's newer name `mtp_model_layer` is the
same as `transformer_layer`; its inner names are those of the target or Megatron's own:

self_attention.linear_qkv  [(heads + 2 kv_heads) d, H], for each key head its queries, the key and the value
self_attention.linear_proj, mlp.linear_fc1 [2 I, H] of gate and up, mlp.linear_fc2, {q,k}_layernorm, input_layernorm (or
linear_qkv.layer_norm_weight), pre_mlp_layernorm (or linear_fc1.layer_norm_weight)

Experts of a mixture come one by one (`mlp.experts.e.gate_proj`) or stacked. Embedding and output layer are the
target's: copies of them beside the heads (`embed_tokens`, `shared_head.head`) are not read.

DeepSeek's heads hand on the state before their norm, the others the one behind it: a pair, and one tensor (as vLLM
and Megatron run them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specserve.errors import ConfigError

_HEADS = {"shared_head.norm": "norm", "final_layernorm": "norm"} | {
    name: name for name in ("enorm", "hnorm", "eh_proj")
}
_ALONE = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "norm"}
_TARGETS = ("embed_tokens.weight", "shared_head.head.weight")
_WRAPPED = ("transformer_layer.", "mtp_model_layer.")
_MEGATRON = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QKV, _GATE_UP = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class MtpDescription:
    """The heads of a checkpoint: how many, and whether each hands on its state before its norm (a pair) or behind."""

    heads: int
    pair: bool


Names = Mapping[str, tuple[Path, str]]
"""Our name of a tensor → the file that holds it, and its name there."""


def find(folder: Path, layers: int) -> tuple[MtpDescription, Names]:
    """The heads in a folder, for a target with so many layers. Raises ConfigError where there are none.

    A name is `heads.i.` and one of enorm, hnorm, eh_proj, norm, or block and the layer's own name.
    """
    names: dict[str, tuple[Path, str]] = {}
    pair = False
    for path in sorted(folder.glob("*.safetensors")):
        for name in _names_in(path):
            own = own_name(name, layers)
            if own is not None:
                names[own] = path, name
                pair |= "shared_head" in name
    heads = sorted({int(name.split(".")[1]) for name in names})
    if not heads:
        raise ConfigError(
            f"{folder} holds no multi-token-prediction heads (none of model.layers.{layers}.eh_proj.weight, "
            f"mtp.fc.weight and mtp.layers.0.eh_proj.weight); use a checkpoint with them, or another draft.speculator"
        )
    if heads != list(range(len(heads))):
        raise ConfigError(f"{folder} holds multi-token-prediction heads {heads} only; is a file of it missing?")
    return MtpDescription(len(heads), pair), names


def own_name(name: str, layers: int) -> str | None:
    """Our name of a tensor of a target with so many layers; None where it is not of a head, or the target's own."""
    if (found := re.search(r"(?:^|\.)mtp\.(fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm)\.(.*)", name)) is not None:
        return f"heads.0.{_ALONE[found[1]]}.{found[2]}"
    if (found := re.search(r"(?:^|\.)mtp\.layers\.(\d+)\.(.*)", name)) is not None:
        return _of_head(int(found[1]), found[2])
    found = re.search(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.*)", name)
    return None if found is None or int(found[1]) < layers else _of_head(int(found[1]) - layers, found[2])


def _of_head(head: int, name: str) -> str | None:
    if name in _TARGETS:
        return None
    module, _, kind = name.rpartition(".")
    if module in _HEADS:
        return f"heads.{head}.{_HEADS[module]}.{kind}"
    for wrapper in _WRAPPED:
        name = name.removeprefix(wrapper)
    return f"heads.{head}.block.{_MEGATRON.get(name, name)}"


def read(names: Names, config: Any) -> dict[str, torch.Tensor]:
    """The heads' tensors under our names, in the shapes that a layer of the target has. Raises ConfigError.

    config is the target's, in transformers' form.
    """
    found: dict[str, torch.Tensor] = {}
    for own, (path, name) in names.items():
        with safe_open(path, framework="pt") as file:
            found |= _split(own, file.get_tensor(name), config)
    return _stacked(found)


def shapes(names: Names) -> dict[str, Sequence[int]]:
    """The shapes of the heads' tensors as they are stored, by our names."""
    found: dict[str, Sequence[int]] = {}
    for own, (path, name) in names.items():
        with safe_open(path, framework="pt") as file:
            found[own] = file.get_slice(name).get_shape()
    return found


def check_width(names: Names, width: int) -> None:
    """Raise ConfigError unless each head joins an embedding and a state of the target's width."""
    for own, shape in shapes(names).items():
        if own.endswith("eh_proj.weight") and list(shape) != [width, 2 * width]:
            raise ConfigError(
                f"{names[own][1]} is {list(shape)}, but heads of a target of width {width} have [{width}, {2 * width}]"
            )


def _split(own: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """What Megatron stores together, taken apart."""
    if own.endswith(_QKV):
        stem = own.removesuffix(_QKV) + "self_attn."
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        queries = config.num_attention_heads // kv_heads
        if tensor.shape[0] % (kv_heads * (queries + 2)):
            raise ConfigError(f"{own} has {tensor.shape[0]} rows, not a multiple of {kv_heads} × ({queries} + 2)")
        groups = tensor.view(kv_heads, queries + 2, -1, tensor.shape[1])
        parts = groups[:, :queries], groups[:, queries], groups[:, queries + 1]
        return {
            f"{stem}{name}_proj.weight": part.reshape(-1, tensor.shape[1])
            for name, part in zip("qkv", parts, strict=True)
        }
    if own.endswith(_GATE_UP):
        gate, up = tensor.chunk(2)
        stem = own.removesuffix(_GATE_UP)
        return {f"{stem}mlp.gate_proj.weight": gate, f"{stem}mlp.up_proj.weight": up}
    return {own: tensor}


def _stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts that come one by one, as transformers holds them: gate_up_proj [E, 2 I, H] and down_proj [E, H, I]."""
    found = {name: tensor for name, tensor in weights.items() if _EXPERT.fullmatch(name) is None}
    experts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in weights.items():
        if (match := _EXPERT.fullmatch(name)) is not None:
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for stem, parts in experts.items():
        gate, up, down = (
            torch.stack([tensor for _, tensor in sorted(parts.get(name, {}).items())] or [torch.empty(0)])
            for name in ("gate", "up", "down")
        )
        found |= {f"{stem}.gate_up_proj": torch.cat([gate, up], 1), f"{stem}.down_proj": down}
    return found


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except Exception as error:  # the library raises its own kinds for a damaged file
        raise ConfigError(f"cannot read {path}: {error}") from None
