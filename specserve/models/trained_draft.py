"""A folder with the trained part of a draft only: embedding, head and tokenizer are its target's.

Such a folder holds `trained_draft.json` and `trained_draft.safetensors`; at first use both models' parts are put
together into an ordinary model folder in the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specserve import cache
from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import _reduced_head, loading
from specserve.models._progress_bars import without_bars

DESCRIPTION = "trained_draft.json"
WEIGHTS = "trained_draft.safetensors"

_FORMAT = 1  # part of the cache key, too
_FINGERPRINT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Description:
    """What a trained draft is. target is a source as in the configuration; layers are numbers of the target's layers
    that training started from; fingerprint is that of the target's embedding; notes are for people.
    """

    target: str
    layers: tuple[int, ...]
    fingerprint: str
    notes: str = ""
    format: int = _FORMAT


def is_trained_draft(folder: Path) -> bool:
    """Whether the folder holds the trained part of a draft."""
    return (folder / DESCRIPTION).is_file()


def write(folder: Path, description: Description, weights: Mapping[str, torch.Tensor]) -> None:
    """Write `layers.…`, `norm.…`, `readout.weight` [width, width] and `ids` int [m] of a trained small model."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)  # it is written for its owner only
    (folder / DESCRIPTION).write_text(json.dumps(asdict(description), indent=2) + "\n", encoding="utf-8")


def read_description(folder: Path) -> Description:
    """Raises ConfigError when the description is not one."""
    path = folder / DESCRIPTION
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != _FORMAT:
            raise ConfigError(f"{path} has format {found['format']}; this version reads format {_FORMAT}")
        return Description(**found | {"layers": tuple(found["layers"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} does not describe a trained draft: {type(error).__name__}: {error}") from None


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What `write` wrote. Raises ConfigError when it is not there or cannot be read."""
    try:
        found: dict[str, torch.Tensor] = load_file(folder / WEIGHTS)
    except Exception as error:  # the library raises its own kinds for a damaged file
        raise ConfigError(f"cannot read {folder / WEIGHTS}: {type(error).__name__}: {error}") from None
    return found


def check_embedding(folder: Path, description: Description, embedding: torch.Tensor) -> None:
    """Raise ConfigError unless the draft in the folder was trained for the target with this embedding [V, width]."""
    if fingerprint(embedding) != description.fingerprint:
        raise ConfigError(f"the draft in {folder} was trained for another target than {description.target!r}")


def completed(folder: Path, progress: Callable[[str], None]) -> Path:
    """The ordinary model folder of a trained draft, put together at first use. Raises ConfigError."""
    description = read_description(folder)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise ConfigError(f"{folder} describes a trained draft but does not hold {WEIGHTS}")
    try:
        target = loading.prepare(ModelConfig(source=description.target), progress)
    except ConfigError as error:
        raise ConfigError(
            f"the draft in {folder} was trained for the target {description.target!r}, which cannot be used: "
            f"{error.message}. If the target has moved, write its place into {DESCRIPTION}"
        ) from None
    name = f"draft-{cache.key_of(_FORMAT, cache.file_identity(weights), target)}"
    return cache.built_once(name, lambda new: _put_together(folder, description, target, new, progress))


def shortened(config: Any, layers: Sequence[int]) -> Any:
    """A transformers configuration with these layers only, in this order."""
    told = config.to_dict() | {"num_hidden_layers": len(layers)}
    if isinstance(told.get("layer_types"), list):
        told["layer_types"] = [told["layer_types"][layer] for layer in layers]
    return type(config).from_dict(told)


def fingerprint(embedding: torch.Tensor) -> str:
    """Of embedding [V, width]; the same for the same model in another dtype that is no narrower than bfloat16."""
    rows = embedding.detach()[:_FINGERPRINT_ROWS].to(device="cpu", dtype=torch.bfloat16).contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()[:32]


def _put_together(
    folder: Path, description: Description, target_folder: Path, new: Path, progress: Callable[[str], None]
) -> None:
    progress(f"putting the draft in {folder.name} and its target's embedding together (once)")
    config = ModelConfig(source=str(target_folder), device="cpu")
    target = loading.load_model(target_folder, config)
    check_embedding(folder, description, target.model.embed_tokens.weight)
    weights = {name: weight.float() for name, weight in read_weights(folder).items()}
    ids, readout = weights.pop("ids").long(), weights.pop("readout.weight")
    draft_config = shortened(target.config, description.layers)
    draft_config.tie_word_embeddings = True  # so no head is written; the reduced one takes its place
    draft = type(target)(draft_config).eval()
    weights["embed_tokens.weight"] = target.model.embed_tokens.weight
    try:
        draft.model.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"the weights in {folder / WEIGHTS} do not fit the target: {error}") from None
    with without_bars():
        draft.save_pretrained(new)
    _reduced_head.write(new, target.lm_head.weight[ids] @ readout, ids)
    loading.copy_tokenizer(target_folder, new)
