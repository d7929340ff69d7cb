"""Key and value pages of all layers, and the step that writes and reads them for one ragged batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from specserve.models import Move
from specserve.models._large_pages import prefer
from specserve.models._row_groups import AttentionPlan, RowGroup


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer keeps per position, and how it attends. `window` counts positions, None is unlimited."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None

    @property
    def bytes_per_position(self) -> int:
        """Bytes of keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class LayoutProbe:
    """A store that keeps nothing and attends to nothing: it only sees what shapes the layers use, and query heads."""

    def __init__(self) -> None:
        self.layouts: dict[int, LayerLayout] = {}
        self.heads: dict[int, int] = {}

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
        """See `KeyValueStore.attend`; the result is zero."""
        del scaling, softcap
        self.heads[layer] = query.shape[1]
        self.layouts[layer] = LayerLayout(key.shape[1], key.shape[2], value.shape[2], key.dtype, window)
        return value.new_zeros(query.shape[0], query.shape[1], value.shape[2])


class Pages:
    """keys[layer], values[layer]: [blocks · block_tokens, kv_heads, dim]. Allocated once, zeroed.

    All that are of one shape lie in one tensor [n, blocks · block_tokens, kv_heads, dim], so that what concerns all
    layers takes one operation and not one for each.
    """

    def __init__(self, layouts: dict[int, LayerLayout], blocks: int, block_tokens: int, device: torch.device) -> None:
        self.block_tokens = block_tokens
        self._device = device
        slots = blocks * block_tokens
        shapes = Counter(shape for layout in layouts.values() for shape in _shapes(layout))
        self._stores = {
            (heads, dim, dtype): prefer(torch.zeros(count, slots, heads, dim, dtype=dtype, device=device))
            for (heads, dim, dtype), count in shapes.items()
        }
        free = {shape: iter(store) for shape, store in self._stores.items()}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        for layer, layout in layouts.items():
            for pages, shape in zip((self.keys, self.values), _shapes(layout), strict=True):
                pages[layer] = next(free[shape])

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """Make the blocks `copies` hold what the blocks `sources` hold, in all layers."""
        for store in self._stores.values():
            blocks = store.view(len(store), -1, self.block_tokens, *store.shape[2:])
            blocks[:, list(copies)] = blocks[:, list(sources)]

    def move(self, moves: Sequence[Move]) -> None:
        """See `HoldsTrees`: all are read before any is written, so that positions may overlap."""
        sources, targets = self._move_slots(moves)
        for store in self._stores.values() if len(sources) else ():
            store.index_copy_(1, targets, store.index_select(1, sources))

    def _move_slots(self, moves: Sequence[Move]) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [m] each: where positions are, and where they go; none that stay where they are."""
        found: tuple[list[int], list[int]] = ([], [])
        for move in moves:
            for place, source in enumerate(move.sources):
                if source == move.first + place:
                    continue
                for slots, position in zip(found, (source, move.first + place), strict=True):
                    block, within = divmod(position, self.block_tokens)
                    slots.append(int(move.table[block]) * self.block_tokens + within)
        sources, targets = (torch.tensor(slots, dtype=torch.int64, device=self._device) for slots in found)
        return sources, targets


def _shapes(layout: LayerLayout) -> tuple[tuple[int, int, torch.dtype], tuple[int, int, torch.dtype]]:
    """Heads, dim and dtype of a layer's keys, and of its values."""
    return (layout.kv_heads, layout.key_dim, layout.dtype), (layout.kv_heads, layout.value_dim, layout.dtype)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products into scores; scaling None is 1/√dim."""

    scaling: float | None
    softcap: float | None


class PagedAttention(Protocol):
    """A way to attend over pages."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
        scores: Scoring,
    ) -> torch.Tensor:
        """[T, heads, value_dim]: what the queries of a plan's tokens find in one layer's pages."""
        ...


class Gathered:
    """Keys and values are gathered, and attended to under a mask: on any device, in any dtype, under any mask."""

    name = "gather"

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
        groups = plan.groups(window, query.shape[1] // keys.shape[1])
        if len(groups) == 1:
            return _attend_group(query, keys, values, groups[0], scores)
        result = query.new_empty(query.shape[0], query.shape[1], values.shape[2])
        for group in groups:
            result.index_copy_(0, group.tokens, _attend_group(query, keys, values, group, scores))
        return result


class PagedStep:
    """One forward's view of the pages: what the attention function gets as `paged`."""

    def __init__(self, pages: Pages, plan: AttentionPlan, attention: PagedAttention | None = None) -> None:
        self._pages = pages
        self._plan = plan
        self._attention = Gathered() if attention is None else attention

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
        """See `KeyValueStore.attend`."""
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        keys.index_copy_(0, self._plan.new_slots, key)
        values.index_copy_(0, self._plan.new_slots, value)
        return self._attention.attend(query, keys, values, self._plan, window, Scoring(scaling, softcap))


def _attend_group(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: RowGroup, scores: Scoring
) -> torch.Tensor:
    """Attention of one group: → [its tokens, heads, value_dim]."""
    folded = _fold(query if group.gather is None else query[group.gather], group, keys.shape[1])
    attended = attend(folded, _read(keys, group), _read(values, group), group.mask, scores)
    result = _unfold(attended, group)
    return result if group.keep is None else result[group.keep]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scores: Scoring
) -> torch.Tensor:
    """[R, kv_heads, queries, dim] over [R, kv_heads, L, dim]. softcap as in Gemma 2: before the mask."""
    if scores.softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scores.scaling)
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    products = scores.softcap * torch.tanh(query @ keys.transpose(2, 3) * (scaling / scores.softcap))
    if mask is not None:
        products = products + mask
    return torch.softmax(products.float(), dim=-1).to(values.dtype) @ values


def _read(pages: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """[R, kv_heads, L, dim]; consecutive slots are read in place."""
    found = pages[group.slots] if isinstance(group.slots, slice) else pages.index_select(0, group.slots)
    return found.view(group.rows, group.keys, *pages.shape[1:]).transpose(1, 2)


def _fold(query: torch.Tensor, group: RowGroup, kv_heads: int) -> torch.Tensor:
    """[R·Q, heads, dim] → [R, kv_heads, fold·Q, dim]: the query heads of one key head become queries of one call."""
    dim = query.shape[2]
    split = query.reshape(group.rows, group.queries, kv_heads, -1, dim)
    return split.permute(0, 2, 3, 1, 4).reshape(group.rows, kv_heads, -1, dim)


def _unfold(attended: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """[R, kv_heads, fold·Q, dim] → [R·Q, heads, dim]."""
    rows, kv_heads, folded, dim = attended.shape
    split = attended.view(rows, kv_heads, folded // group.queries, group.queries, dim)
    return split.permute(0, 3, 1, 2, 4).reshape(rows * group.queries, -1, dim)
