"""Attention of a draft head in training, which reads its own states as it will when it drafts.

In the first step every place reads the target's state before it. In each later step all places move on by one token
and read the state that the step before gave there, as if all tokens since had been drafted: what EAGLE-3 calls
training-time test (Li et al. 2025; HASS, Zhang et al. 2025, before it). What such a place may attend to are the
first step's keys up to where its chain began, and one key of each later step: those of its own chain.
"""

from __future__ import annotations

import torch


class Unrolled:
    """A `KeyValueStore` for the steps of one batch of so many rows, all layers.

    Step k has the last n − k of n places. Its i-th place began its chain at the first step's i-th, so of every step
    after the first it attends to the i-th key. Rows are padded at their ends, where nobody looks.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `KeyValueStore.attend`; a head's layers have neither windows nor capped scores."""
        del window, softcap
        steps = self._kept.setdefault(layer, [])
        steps.append((self._by_head(key), self._by_head(value)))
        grouped = query.view(self._rows, -1, key.shape[1], query.shape[1] // key.shape[1], query.shape[2])
        queries = grouped.permute(0, 2, 3, 1, 4)
        attended = _attended(queries * (scaling or query.shape[-1] ** -0.5), steps)
        return attended.permute(0, 3, 1, 2, 4).reshape(query.shape)

    def _by_head(self, flat: torch.Tensor) -> torch.Tensor:
        """[rows · n, heads, dim] → [rows, heads, n, dim]."""
        return flat.view(self._rows, -1, *flat.shape[1:]).transpose(1, 2)


def _attended(queries: torch.Tensor, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Queries [rows, kv_heads, group, n, dim] and the steps' keys and values [rows, kv_heads, n or more, dim]."""
    n, flat = queries.shape[3], queries.flatten(2, 3)
    keys, values = (each[:, :, :n] for each in steps[0])
    shared = (flat @ keys.transpose(-1, -2)).view(*queries.shape[:4], n)
    shared = shared.masked_fill(torch.ones(n, n, dtype=torch.bool, device=queries.device).triu(1), float("-inf"))
    own = [(queries * key[:, :, None, :n]).sum(-1, keepdim=True) for key, _ in steps[1:]]
    weights = torch.softmax(torch.cat([shared, *own], -1), -1).to(values.dtype)
    found = (weights[..., :n].flatten(2, 3) @ values).view(queries.shape)
    for place, (_, value) in enumerate(steps[1:], n):
        found = found + weights[..., place, None] * value[:, :, None, :n]
    return found
