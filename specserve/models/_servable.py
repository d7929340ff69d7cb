"""What a model's folder shows of whether it can be served, before any weight is read."""

from __future__ import annotations

from pathlib import Path

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import _refusals, _rounded_layers, loading
from specserve.models.loading import Role

_LAYERS = {loading.PAGED: _refusals.LAYER_TYPES, loading.RECURRENT: _refusals.RECURRENT_LAYER_TYPES}


def backend_for(role: Role, model: ModelConfig, folder: Path) -> str:
    """The file in `models/` that serves this folder. Raises ConfigError where it cannot, in this role or as configured.

    `folder` is what `loading.prepare` made of the model's source.
    """
    name = loading.backend_of(folder, model)
    if role == "draft" and name == loading.RECURRENT:
        # A draft is rewound into the middle of many small forwards, of which such a backend keeps the last one only.
        raise ConfigError(f"{folder} keeps recurrent state, which a draft model may not; use another draft, or ngram")
    if role == "target" and name == loading.HEAD:
        raise ConfigError(f"{folder} holds a draft head, which cannot be a target; give it as draft.model.source")
    _rounded_layers.refuse_unfit(model, recurrent=name == loading.RECURRENT, emulated=name == loading.EMULATED)
    if model.quantization != "none":
        _rounded_layers.refuse_device(model, loading.device_of(model))
    if model.tensor_parallel > 1:
        from specserve.models import _tensor_parallel

        _tensor_parallel.refuse_undivided(model, folder)
    if name == loading.EMULATED:
        from specserve.models import _device_profile

        _device_profile.load(model.emulated.profile)
    if name in _LAYERS:
        _refusals.refuse_unservable(loading.load_model_config(folder, model), _LAYERS[name])
    return name
