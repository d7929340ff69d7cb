"""What distilling computes in. The folders that it writes do not depend on that."""

from __future__ import annotations

from typing import Literal

import torch


def quick_dtype(device: torch.device) -> Literal["bfloat16", "float32"]:
    """bfloat16 where the device multiplies it at least as quickly as float32, else float32.

    GPUs do, and CPUs with AMX or AVX-512 BF16. Others emulate such products: one with AVX2 alone takes six times as
    long for them.
    """
    if device.type == "cuda":
        return "bfloat16"
    quick = device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    return "bfloat16" if quick else "float32"
