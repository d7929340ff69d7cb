"""Paged attention by a kernel that reads pages where they are; what it cannot do is gathered.

Kernels take rows whose queries are the last of their keys, causal from the end, through block tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specserve.models._pages import Gathered, Scoring
from specserve.models._row_groups import AttentionPlan, PackedRows


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call for one layer: query [T, heads, dim] over keys and values [blocks, block_tokens, kv_heads, dim].

    left is how many keys before its own a query sees, None for all. The result is [T, heads, value_dim].
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: PackedRows
    left: int | None
    scaling: float | None
    softcap: float | None


Kernel = Callable[[KernelCall], torch.Tensor]


class KernelAttention:
    """A `PagedAttention` by `kernel`; softcaps says whether it knows them."""

    def __init__(self, name: str, kernel: Kernel, block_tokens: int, *, softcaps: bool) -> None:
        self.name = name
        self._kernel = kernel
        self._block_tokens = block_tokens
        self._softcaps = softcaps
        self._gathered = Gathered()

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
        scores: Scoring,
    ) -> torch.Tensor:
        """See `PagedAttention`."""
        rows = plan.packed()
        if rows is None or (scores.softcap is not None and not self._softcaps):
            return self._gathered.attend(query, keys, values, plan, window, scores)
        left = None if window is None else window - 1
        blocks = [pages.view(-1, self._block_tokens, *pages.shape[1:]) for pages in (keys, values)]
        call = KernelCall(query.contiguous(), blocks[0], blocks[1], rows, left, scores.scaling, scores.softcap)
        return self._kernel(call)
