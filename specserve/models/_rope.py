"""Rotary embeddings whose factors depend on length, fixed once for the configured context.

transformers derives dynamic-NTK and LongRoPE factors from the largest position of the whole batch. In a ragged
batch a row's result would then depend on its company, and keys that are already cached would belong to other
factors. So the factors are chosen at load, by the context that the deployment serves, and never again:

- LongRoPE (Phi 3 and others): the long factors when the context is above `original_max_position_embeddings`, else
  the short ones. The same choice for every request, short prompts included. Ding et al. 2024.
- dynamic NTK: the base that belongs to a sequence of exactly the context's length.
- default, linear, Llama 3 and YaRN factors never depend on length; nothing is done.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specserve.errors import ConfigError

_FROZEN = "frozen by specserve"  # any name that transformers does not update on
_EXTENDABLE = frozenset({"dynamic", "yarn"})


def longest_context(config: Any) -> int | None:
    """Positions that a model can address when asked to: its trained length, times the factor of a rope that scales.

    None where the configuration names no length.
    """
    trained: int | None = getattr(config, "max_position_embeddings", None)
    if trained is None:
        return None
    lengths = [trained]
    for parameters in _parameter_sets(config):
        if parameters.get("rope_type") in _EXTENDABLE and parameters.get("factor"):
            original = parameters.get("original_max_position_embeddings") or trained
            lengths.append(int(original * parameters["factor"]))
    return max(lengths)


def served_context(config: Any, wanted: int | None) -> int:
    """Positions to serve: the trained length, or `wanted` as far as the model reaches.

    Raises ConfigError when neither the model nor the deployment names a length.
    """
    longest = longest_context(config)
    if longest is None and wanted is None:
        raise ConfigError(f"{config.model_type!r} names no context length; set context_length")
    if wanted is None:
        return int(config.max_position_embeddings)
    return wanted if longest is None else min(wanted, longest)


def _parameter_sets(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [nested for nested in parameters.values() if isinstance(nested, dict)]


def freeze(model: torch.nn.Module, context_length: int) -> None:
    """Fix the factors of every length-dependent rotary embedding in `model` for `context_length` positions."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _depends_on_length(rope_type):
            _fix(module, rope_type, "", context_length, {})
            module.rope_type = _FROZEN  # type: ignore[assignment]
        elif isinstance(rope_type, dict):
            for layer_type in [name for name, kind in rope_type.items() if _depends_on_length(kind)]:
                _fix(module, rope_type[layer_type], f"{layer_type}_", context_length, {"layer_type": layer_type})
                rope_type[layer_type] = _FROZEN


def _depends_on_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _fix(module: torch.nn.Module, rope_type: str, prefix: str, context_length: int, layer_type: dict[str, str]) -> None:
    factors: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    frozen, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, factors.device, seq_len=context_length, **layer_type
    )
    factors.copy_(frozen)
    setattr(module, f"{prefix}attention_scaling", scaling)
