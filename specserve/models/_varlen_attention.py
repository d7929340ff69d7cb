"""torch's own attention over pages, `torch.nn.attention.varlen`, where a backend that knows block tables is there."""

from __future__ import annotations

from typing import Any

import torch

from specserve.models._kernel_attention import KernelAttention, KernelCall

NAME = "varlen"
_BACKENDS = {9: "FA3", 10: "FA4"}
"""Of torch's flash attention, by the major compute capability that each is made for; its built-in one has no pages."""


def made(block_tokens: int, device: torch.device) -> KernelAttention:
    """Activate the backend for this device, for the whole process. Raises ImportError or RuntimeError without one."""
    if device.type != "cuda":
        raise RuntimeError(f"needs a CUDA device, not {device}")
    from torch.nn import attention
    from torch.nn.attention.varlen import varlen_attn

    major, _ = torch.cuda.get_device_capability(device)
    if major not in _BACKENDS:
        raise RuntimeError(f"no backend with block tables for compute capability {major}")
    attention.activate_flash_attention_impl(_BACKENDS[major])

    def kernel(call: KernelCall) -> torch.Tensor:
        rows = call.rows
        key_begins: Any = None  # lengths and tables say it
        found = varlen_attn(
            call.query,
            call.keys,
            call.values,
            rows.begins,
            key_begins,
            rows.queries,
            rows.keys,
            scale=call.scaling,
            window_size=(-1 if call.left is None else call.left, 0),
            enable_gqa=True,
            seqused_k=rows.used,
            block_table=rows.tables,
        )
        assert isinstance(found, torch.Tensor), "nothing besides was asked for"
        return found

    return KernelAttention(NAME, kernel, block_tokens, softcaps=False)


def dismissed() -> None:
    """Another way was chosen: torch's attention is as it was."""
    from torch.nn import attention

    # Older versions of torch have no backends to choose from.
    if hasattr(attention, "current_flash_attention_impl") and attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
