"""GGUF files, dequantised through transformers into an ordinary folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from specserve import cache
from specserve.errors import ConfigError
from specserve.models._progress_bars import without_bars
from specserve.models.loading import Progress

_FORMAT = 1  # part of the cache key: raise it when what is written here changes


def converted(path: Path, progress: Progress, sampling: Mapping[str, float] = MappingProxyType({})) -> Path:
    """The cache folder with the file's weights in float32, its configuration, tokenizer and chat template.

    sampling is put among the generation settings: how the model's makers would have its tokens drawn.
    Raises ConfigError when the file cannot be read.
    """

    def build(folder: Path) -> None:
        progress(f"converting {path.name} (once; cached in {cache.root()})")
        with without_bars():
            _convert(path, folder, sampling)

    key = cache.key_of(_FORMAT, cache.file_identity(path), *map(str, sampling.items()))
    return cache.built_once(f"gguf-{path.stem}-{key}", build)


def _convert(path: Path, folder: Path, sampling: Mapping[str, float]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
    except Exception as error:  # a damaged or unknown file fails in many ways
        raise ConfigError(f"cannot read the GGUF file {path}: {type(error).__name__}: {str(error)[:500]}") from None
    plain = _without_quantisation(model)
    if sampling:
        plain.generation_config.update(do_sample=True, **sampling)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _without_quantisation(model: Any) -> Any:
    """A copy that can be saved: transformers refuses to save a model that it loaded from a GGUF file."""
    from transformers import AutoModelForCausalLM

    config = type(model.config).from_dict(
        {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain
