"""Which configurations this backend cannot serve, told before any weight is read."""

from __future__ import annotations

from typing import Any

from specserve.errors import ConfigError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def refuse_unservable(config: Any) -> None:
    """Raise ConfigError for a transformers configuration that is not a plain, causal, attention-only text model."""
    kind = f"{getattr(config, 'model_type', 'this model')!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{kind} is an encoder-decoder model; only decoder-only models are served")
    if config.get_text_config() is not config:
        raise ConfigError(f"{kind} is a multimodal model; only text models are served")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(f"{kind} attends in both directions; only causal models are served")
    strange = sorted(set(getattr(config, "layer_types", None) or []) - _LAYER_TYPES)
    if strange:
        raise ConfigError(
            f"{kind} has layers of type {', '.join(strange)}; served are {' and '.join(sorted(_LAYER_TYPES))}"
        )


def refuse_model_class(model: Any) -> None:
    """Raise ConfigError for a model class that keeps recurrent state or does not use the attention interface."""
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise ConfigError(f"{name} keeps recurrent state; only models whose layers are all attention are served")
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{name} does not use transformers' attention interface, so its keys cannot be paged")


def expected_window(config: Any, layer: int) -> int | None:
    """The sliding window of a layer, in positions, as the configuration's `layer_types` tell; None is unlimited."""
    types = config.layer_types
    return config.sliding_window if types[layer] == "sliding_attention" else None


def refuse_unseen_windows(config: Any, windows: dict[int, int | None]) -> None:
    """Raise ConfigError when layers attended with another window than the configuration tells, or not at all."""
    layers = config.num_hidden_layers
    if sorted(windows) != list(range(layers)):
        raise ConfigError(f"{config.model_type!r} paged {len(windows)} of its {layers} layers; it cannot be served")
    if not getattr(config, "layer_types", None):
        return
    wrong = [layer for layer, window in windows.items() if window != expected_window(config, layer)]
    if wrong:
        raise ConfigError(
            f"{config.model_type!r} does not tell its attention the sliding window of layers {wrong[:8]}; "
            f"it cannot be served"
        )
