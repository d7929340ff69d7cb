"""Which configurations this backend cannot serve, told before any weight is read."""

from __future__ import annotations

from typing import Any

from specserve.errors import ConfigError

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layers whose whole state is positional."""

_STATEFUL = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
_STATELESS = frozenset({"moe", "mlp"})
RECURRENT_LAYER_TYPES = LAYER_TYPES | _STATEFUL | _STATELESS
"""What a recurrent or hybrid model may be made of."""


def is_recurrent(config: Any) -> bool:
    """Whether a transformers configuration has layers that keep state per sequence instead of per position."""
    return bool(_STATEFUL & set(getattr(config, "layer_types", None) or []))


def refuse_unservable(config: Any, served: frozenset[str] = LAYER_TYPES) -> None:
    """Raise ConfigError for a transformers configuration that is not a plain, causal text model of `served` layers."""
    kind = f"{getattr(config, 'model_type', 'this model')!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{kind} is an encoder-decoder model; only decoder-only models are served")
    if config.get_text_config() is not config:
        raise ConfigError(f"{kind} is a multimodal model; only text models are served")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(f"{kind} attends in both directions; only causal models are served")
    strange = sorted(set(getattr(config, "layer_types", None) or []) - served)
    if strange:
        raise ConfigError(f"{kind} has layers of type {', '.join(strange)}; served are {', '.join(sorted(served))}")


def refuse_model_class(model: Any) -> None:
    """Raise ConfigError for a model class that keeps recurrent state or does not use the attention interface."""
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise ConfigError(f"{name} keeps recurrent state; only models whose layers are all attention are served")
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{name} does not use transformers' attention interface, so its keys cannot be paged")


def expected_window(config: Any, layer: int) -> int | None:
    """The sliding window of a layer, in positions, as the configuration's `layer_types` tell; None is unlimited."""
    return config.sliding_window if config.layer_types[layer] in ("sliding_attention", "hybrid_sliding") else None


def _attending(config: Any) -> list[int]:
    """The layers that keep keys and values: all of them, unless the configuration tells them apart."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    silent = _STATELESS | {"linear_attention", "conv"}
    return [layer for layer, kind in enumerate(types) if kind not in silent]


def refuse_unseen_windows(config: Any, windows: dict[int, int | None]) -> None:
    """Raise ConfigError when layers attended with another window than the configuration tells, or not at all."""
    layers = _attending(config)
    if sorted(windows) != layers:
        raise ConfigError(
            f"{config.model_type!r} paged layers {sorted(windows)[:8]} of its {len(layers)} attention layers; "
            f"it cannot be served"
        )
    if not getattr(config, "layer_types", None):
        return
    wrong = [layer for layer, window in windows.items() if window != expected_window(config, layer)]
    if wrong:
        raise ConfigError(
            f"{config.model_type!r} does not tell its attention the sliding window of layers {wrong[:8]}; "
            f"it cannot be served"
        )
