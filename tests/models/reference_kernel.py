"""What kernels for paged attention promise, in plain operators: varlen queries, block tables, causal from the end."""

from __future__ import annotations

import torch

from specserve.models._kernel_attention import KernelCall


def reference_kernel(call: KernelCall) -> torch.Tensor:
    """Row by row. Keys past `used` are not read, and a query without any key gives zeros."""
    heads, kv_heads = call.query.shape[1], call.keys.shape[2]
    block_tokens = call.keys.shape[1]
    result = call.query.new_zeros(*call.query.shape[:2], call.values.shape[3])
    begins, used = call.rows.begins.tolist(), call.rows.used.tolist()
    assert call.rows.key_begins.tolist() == [sum(used[:row]) for row in range(len(used) + 1)]
    for row, (begin, end, length) in enumerate(zip(begins, begins[1:], used, strict=False)):
        assert end - begin <= call.rows.queries
        assert length <= call.rows.keys
        blocks = call.rows.tables[row, : -(-length // block_tokens)].long()
        keys, values = (
            pages[blocks].flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1)
            for pages in (call.keys, call.values)
        )
        for at in range(begin, end):
            last = length - (end - at)
            first = 0 if call.left is None else max(0, last - call.left)
            if last < first:
                continue
            scale = call.query.shape[2] ** -0.5 if call.scaling is None else call.scaling
            scores = torch.einsum("hd,khd->hk", call.query[at], keys[first : last + 1]) * scale
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            result[at] = torch.einsum("hk,khd->hd", torch.softmax(scores, -1), values[first : last + 1])
    return result
