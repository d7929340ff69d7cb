"""Heads made of other layers than Llama's draft what transformers' own implementation of them drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_heads
import tiny_mtp
import torch
from test_eagle import asked
from test_mtp import VOCAB, compare, random_prompts, run, settings
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config
from transformers.modeling_layers import MtpModel

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
FAMILIES = {
    "deepseek_v3": lambda heads: DeepseekV3Config(
        **SMALL,
        num_mtp_layers=heads,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "qwen3": lambda heads: Qwen3Config(
        **SMALL, num_mtp_layers=heads, head_dim=8, mtp_layer_types=["full_attention"] * heads
    ),
}


class TransformersHeads:
    """transformers' heads beside their target, without a cache: everything is read anew for every chain."""

    def __init__(self, config, heads: int) -> None:
        torch.manual_seed(4)
        self.target = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        self.heads = MtpModel(self.target, heads).eval()
        for name, parameter in self.heads.layers.named_parameters():
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)

    def save(self, folder: Path) -> Path:
        """The target with its heads, named as in Megatron's exports, which hand one tensor on as transformers does."""
        self.target.save_pretrained(folder)
        found = {}
        for name, tensor in self.heads.layers.state_dict().items():
            head, rest = name.split(".", 1)
            rest = rest.replace("mtp_block.", "mtp_model_layer.").replace("post_norm", "final_layernorm")
            found[f"mtp.layers.{head}.{rest}"] = tensor
        return tiny_mtp.add(tiny_heads.words(folder, VOCAB), found)

    @torch.no_grad()
    def read_target(self, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
        """The target's own choice behind each token, and its states."""
        found = self.target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        return found.logits[0].argmax(-1).tolist(), found.hidden_states[-1][0]

    @torch.no_grad()
    def drafts(self, tokens: list[int], states: torch.Tensor, depth: int) -> list[int]:
        """The chain behind these tokens, one token by each head."""
        ids = torch.tensor([tokens[1:]])
        places = torch.arange(1, len(tokens))[None]
        drafted, _, _ = self.heads(ids, states[None, : len(tokens) - 1], None, places, None)
        return drafted[0, :depth].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Latent attention and a mixture of experts, and norms of queries and keys; three heads, chains of three."""
    reference = TransformersHeads(FAMILIES[family](3), 3)
    folder = reference.save(tmp_path / "target")
    requests = asked(random_prompts(14, (4, 11, 25)), tokens=10)
    answers, recorder = run(settings(folder, depth=3), requests)
    assert compare(reference, requests, answers, recorder) > 15
