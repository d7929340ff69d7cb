"""Whether a model's weights are rounded to bytes, where the configuration leaves that open.

A draft's step on a CPU reads all of its weights for one token, so it takes a quarter of the time where they are bytes;
and what a draft loses by rounding costs nothing but a rare guess. A target's weights are what is to be served.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from specserve.config import ModelConfig


def decided(config: ModelConfig, role: Literal["draft", "target"], folder: Path, backend: str) -> ModelConfig:
    """The configuration with int8 or none in place of auto. backend is the name that `loading.backend_of` gives."""
    if config.quantization != "auto":
        return config
    gains = role == "draft" and config.tensor_parallel == 1 and _reads_bytes(config, folder, backend)
    return config.model_copy(update={"quantization": "int8" if gains else "none"})


def _reads_bytes(config: ModelConfig, folder: Path, backend: str) -> bool:
    """Whether the model's step is one call of C here, in which int8 weights are read as they are."""
    from specserve.models import loading

    if backend not in (loading.PAGED, loading.HEAD):
        return False
    from specserve.models import _flat_decoder, _linear

    if not _linear.reads_int8(config.dtype, loading.device_of(config)):
        return False
    if backend == loading.HEAD:
        return True
    return not _flat_decoder.KIN.isdisjoint(loading.read_model_config(folder).get("architectures") or ())
