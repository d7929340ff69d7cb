"""The one attention function that specserve registers with transformers.

A name that is known to transformers' attention interface and unknown to its mask interface makes a model build no
mask, so a forward over flat rows reaches `paged_attention` with `attention_mask=None` and, through the model's
keyword arguments, the object that knows where the rows' keys and values are. There is no global state.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from specserve.errors import ConfigError

NAME = "specserve_paged"

# What models hand to every attention function and what has no bearing on the result here: positions are in the
# rotated queries and keys already, dropout is off in eval mode, and no transformers cache takes part.
_WITHOUT_BEARING = frozenset(
    {"position_ids", "position_embeddings", "use_cache", "dropout", "output_attentions", "output_hidden_states"}
    | {"output_router_logits", "return_dict", "cache", "past_key_values", "cache_position", "deterministic"}
)


class KeyValueStore(Protocol):
    """What a forward hands to the attention function as the keyword argument `paged`."""

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
        """Keep the new keys and values of a layer and attend.

        query [T, heads, key_dim], key [T, kv_heads, key_dim], value [T, kv_heads, value_dim] of the flat batch.
        Returns [T, heads, value_dim]. scaling None is 1/√key_dim. window counts positions, the query's own included.
        """
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    paged: KeyValueStore | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [B, heads, T, key_dim] and so on → [B, T, heads, value_dim].

    The flat batch of `paged` is these B rows one after the other.

    Raises ConfigError where the model wants what this function does not do, or does not hand `paged` through.
    """
    _refuse_what_is_not_handled(module, attention_mask, is_causal, others)
    if paged is None:
        raise ConfigError(f"{type(module).__name__} does not hand keyword arguments to its attention: cannot be paged")
    attended = paged.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        _flat(query),
        _flat(key),
        _flat(value),
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return attended.view(query.shape[0], -1, *attended.shape[1:]), None


def _flat(heads: torch.Tensor) -> torch.Tensor:
    """[B, heads, T, dim] → [B·T, heads, dim], a view for one row."""
    return heads[0].transpose(0, 1) if len(heads) == 1 else heads.transpose(1, 2).flatten(0, 1)


def _refuse_what_is_not_handled(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    name = type(module).__name__
    if getattr(module, "layer_idx", None) is None:
        raise ConfigError(f"{name} does not know its layer_idx; it cannot be paged")
    if attention_mask is not None or is_causal is False:
        raise ConfigError(f"{name} brings its own attention mask or is not causal; it cannot be paged")
    unknown = sorted(key for key, value in others.items() if value is not None and key not in _WITHOUT_BEARING)
    if unknown:
        raise ConfigError(f"{name} passes {', '.join(unknown)} to its attention, which paged attention does not handle")


AttentionInterface.register(NAME, paged_attention)
