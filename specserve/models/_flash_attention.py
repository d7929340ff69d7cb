"""Attention over pages by the flash-attn library, where it is installed. Its second generation reads blocks of 256."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from specserve.models._kernel_attention import KernelAttention, KernelCall

NAME = "flash-attn"


def made(block_tokens: int, device: torch.device) -> KernelAttention:
    """Raises ImportError or RuntimeError where it is not there."""
    if device.type != "cuda":
        raise RuntimeError(f"needs a CUDA device, not {device}")
    attend: Any = import_module("flash_attn").flash_attn_varlen_func

    def kernel(call: KernelCall) -> torch.Tensor:
        rows = call.rows
        found: torch.Tensor = attend(
            call.query,
            call.keys,
            call.values,
            rows.begins,
            rows.key_begins,
            rows.queries,
            rows.keys,
            softmax_scale=call.scaling,
            causal=True,
            window_size=(-1 if call.left is None else call.left, 0 if call.left is not None else -1),
            softcap=call.softcap or 0.0,
            block_table=rows.tables,
        )
        return found

    return KernelAttention(NAME, kernel, block_tokens, softcaps=True)
