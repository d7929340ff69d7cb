"""Tiny random recurrent and hybrid models."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
_SMALL = _IDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_LAYERS = ["linear_attention", "full_attention", "linear_attention"]
_PURE = _IDS | {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 16}

CONFIGS: dict[str, Any] = {
    "mamba2": lambda **v: Mamba2Config(**_PURE, num_heads=8, head_dim=8, n_groups=1, chunk_size=8, **v),
    "mamba": lambda **v: MambaConfig(**_PURE, **v),
    "falcon_h1": lambda **v: FalconH1Config(**_SMALL, **_MAMBA, mamba_d_ssm=64, **v),
    "bamba": lambda **v: BambaConfig(**_SMALL, **_MAMBA, attn_layer_indices=[1], **v),
    "granitemoehybrid": lambda **v: GraniteMoeHybridConfig(
        **_SMALL, **_MAMBA, layer_types=_LAYERS, num_local_experts=0, shared_intermediate_size=48, **v
    ),
    "lfm2": lambda **v: Lfm2Config(
        **_SMALL, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False, **v
    ),
    "qwen3_next": lambda **v: Qwen3NextConfig(
        **_SMALL,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=_LAYERS,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **v,
    ),
    "jamba": lambda **v: JambaConfig(
        **_SMALL, attn_layer_period=3, attn_layer_offset=1, num_experts=1, mamba_dt_rank=4, **v
    ),
    "nemotron_h": lambda **v: NemotronHConfig(
        **{key: value for key, value in _SMALL.items() if key != "num_hidden_layers"},
        layers_block_type=_LAYERS,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=8,
        **v,
    ),
    "zamba2": lambda **v: Zamba2Config(
        **_SMALL,
        mamba_d_state=16,
        mamba_ngroups=1,
        n_mamba_heads=8,
        mamba_headdim=8,
        chunk_size=8,
        hybrid_layer_ids=[1],
        num_mem_blocks=1,
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        **v,
    ),
}

SERVED = sorted(set(CONFIGS) - {"zamba2"})


def tiny(family: str, vocab_size: int = 97, seed: int = 0) -> Any:
    """A random model in eval mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](vocab_size=vocab_size))
    return model.eval().requires_grad_(False)
