"""Draft heads of the EAGLE family: from a published checkpoint to a folder that `eagle` serves, made once.

What is read (Li et al. 2024 and 2025). H is the head's width, T the target's, V its vocabulary, m ≤ V. A prefix
`model.` of any name is dropped.

EAGLE     fc.weight [H, 2 T] of (embedding, hidden), H = T; fc.bias [H] where there is one; layers.i.… of a Llama layer,
          layers.0 without input_layernorm
EAGLE-3   fc.weight [H, a T] of the hidden states that enter `a` of the target's layers; midlayer.… (or layers.0.…) of a
          Llama layer with hidden_norm.weight [H] and q_proj, k_proj, v_proj of width 2 H; norm.weight [H]
both      embed_tokens.weight [V, H] and lm_head.weight [m or V, H], the target's where there is none; d2t int [m] with
          the head's row i speaking of id i + d2t[i], for all ids where there is none; t2d, the same the other way
          round, is not needed

config.json is a Llama's. For EAGLE-3 `eagle_aux_hidden_state_layer_ids`, at top or within `eagle_config`, names the
target's layers, by default 2, half of them, and the last but two. Where `target_fingerprint` stands in it, as our own
training writes it, a target with another embedding is refused.

The folder that is made holds all of these under one set of names, and the target's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specserve import cache
from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import loading, trained_draft

WEIGHTS = "model.safetensors"
FINGERPRINT = "target_fingerprint"

_FORMAT = 1  # part of the cache key
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_TARGETS_HEAD = ("lm_head.weight", "model.embed_tokens.weight")
_ARCHITECTURE = "eagle"


@dataclass(frozen=True, slots=True)
class HeadDescription:
    """A head: of which generation, which of the target's hidden states it reads, and its layers' Llama configuration.

    read holds the numbers of the target's layers whose inputs are read; none stands for the target's last state.
    biased names the weights that have a bias. norm_first: the layer goes on from its normed input (EAGLE-3 only).
    """

    generation: Literal[1, 3]
    read: tuple[int, ...]
    target_width: int
    layers: int
    biased: tuple[str, ...]
    norm_first: bool
    llama: dict[str, Any]

    @property
    def read_width(self) -> int:
        """Numbers of the target's that are read at each position."""
        return self.target_width * max(1, len(self.read))


def is_head(folder: Path, config: ModelConfig) -> bool:
    """Whether a folder holds a draft head that needs its target's parts, as it was published. Raises ConfigError.

    The first heads have an ordinary model's config.json, so their weights tell; pickled ones where they may be read.
    """
    if not (folder / "config.json").is_file():
        return False
    told = loading.read_model_config(folder)
    names = [str(name).lower() for name in told.get("architectures") or []]
    if any(_ARCHITECTURE in name for name in names) or "eagle_config" in told:
        return True
    readable = any(folder.glob("*.safetensors")) or (config.allow_pickle_weights and any(folder.glob("*.bin")))
    return readable and "fc.weight" in _shapes(folder, config)


def layers_read(config: ModelConfig) -> tuple[int, ...]:
    """The target's layers whose inputs a published head reads; none for the target's last state. Raises ConfigError."""
    folder = loading.source_path(config)
    if not is_head(folder, config):
        raise ConfigError(f"there is no draft head at {config.source!r}: expected the folder of an EAGLE checkpoint")
    target = loading.read_model_config(_target_folder(config, lambda _: None))
    return describe(loading.read_model_config(folder), _shapes(folder, config), target).read


def completed(folder: Path, config: ModelConfig, progress: Callable[[str], None]) -> Path:
    """The folder of a published head together with its target's parts, made at first use. Raises ConfigError."""
    if config.target is None:
        raise ConfigError(f"{folder} holds a draft head, which cannot be a target; give it as draft.model.source")
    target = _target_folder(config, progress)
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"])
    name = f"head-{cache.key_of(_FORMAT, *map(cache.file_identity, files), target)}"
    return cache.built_once(name, lambda new: _put_together(folder, config, target, new, progress))


def read_description(folder: Path) -> HeadDescription:
    """Of a folder that `completed` made."""
    told = loading.read_model_config(folder)["head"]
    return HeadDescription(**told | {"read": tuple(told["read"]), "biased": tuple(told["biased"])})


def _target_folder(config: ModelConfig, progress: Callable[[str], None]) -> Path:
    if config.target == loading.EMULATED:
        raise ConfigError("an emulated target has no hidden states, so no draft head can read them")
    return loading.prepare(config.model_copy(update={"source": config.target, "target": None}), progress)


def describe(told: dict[str, Any], shapes: Mapping[str, Sequence[int]], target: dict[str, Any]) -> HeadDescription:
    """What a head with this config.json and weights of these shapes is, beside a target with that config.json.

    Raises ConfigError when it is none, or does not fit the target.
    """
    if "fc.weight" not in shapes:
        raise ConfigError("the draft head has no fc.weight, so it is of no known kind")
    third = "layers.0.hidden_norm.weight" in shapes
    read = _aux_layers(told, int(target["num_hidden_layers"])) if third else ()
    (width, fused), target_width = shapes["fc.weight"], int(target["hidden_size"])
    wanted = target_width * len(read) if third else 2 * target_width
    if fused != wanted or (not third and width != target_width):
        raise ConfigError(
            f"fc.weight of the draft head is {[width, fused]}, which does not fit a target of width "
            f"{target_width} read at {max(1, len(read))} places; was it trained for another target?"
        )
    numbers = {int(name.split(".")[1]) for name in shapes if name.startswith("layers.")}
    return HeadDescription(
        generation=3 if third else 1,
        read=read,
        target_width=target_width,
        layers=len(numbers),
        biased=tuple(sorted(name for name in shapes if name.endswith(".bias"))),
        norm_first=bool(told.get("norm_before_residual", False)),
        llama=told,
    )


def default_layers(layers: int) -> tuple[int, ...]:
    """Those that an EAGLE-3 head reads where nothing is said, of a target with so many."""
    return 2, layers // 2, layers - 3


def _aux_layers(told: dict[str, Any], layers: int) -> tuple[int, ...]:
    named = told.get("eagle_config") or {}
    ids = told.get("eagle_aux_hidden_state_layer_ids") or named.get("eagle_aux_hidden_state_layer_ids")
    found = tuple(int(layer) for layer in ids or default_layers(layers))
    if not all(0 <= layer < layers for layer in found):
        raise ConfigError(
            f"the draft head reads layers {list(found)} of a target with {layers}; was it trained for another?"
        )
    return found


def read_weights(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """All tensors of a published head under our names. Raises ConfigError."""
    loading.check_folder(folder, config)
    found: dict[str, torch.Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            found |= load_file(path)
        for path in sorted(folder.glob("*.bin")) if not found else ():
            found |= torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # damaged files of either kind are one thing to a user
        raise ConfigError(f"cannot read the weights in {folder}: {type(error).__name__}: {error}") from None
    return {_own_name(name): tensor for name, tensor in found.items()}


def _shapes(folder: Path, config: ModelConfig) -> dict[str, Sequence[int]]:
    """The shapes of all tensors of a published head under our names. Raises ConfigError."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        return {name: tensor.shape for name, tensor in read_weights(folder, config).items()}
    found: dict[str, Sequence[int]] = {}
    try:
        for path in paths:
            with safe_open(path, framework="pt") as file:
                found |= {_own_name(name): file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # the library raises its own kinds for a damaged file
        raise ConfigError(f"cannot load the model in {folder}: cannot read its weights: {error}") from None
    return found


def _own_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _put_together(folder: Path, config: ModelConfig, target: Path, new: Path, progress: Callable[[str], None]) -> None:
    progress(f"putting the draft head in {folder.name} and its target's embedding together (once)")
    weights = read_weights(folder, config)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    description = describe(loading.read_model_config(folder), shapes, loading.read_model_config(target))
    offsets = weights.pop("d2t", None)
    weights.pop("t2d", None)
    if _EMBEDDING not in weights:
        weights[_EMBEDDING] = _of_target(target, _TARGETS_HEAD[1:])
        if description.llama.get(FINGERPRINT) not in (None, trained_draft.fingerprint(weights[_EMBEDDING])):
            raise ConfigError(f"the draft head in {folder} was trained for another target than {config.target!r}")
    ids = None if offsets is None else torch.arange(len(offsets)) + offsets.long()
    if _HEAD not in weights:
        head = _of_target(target, _TARGETS_HEAD)
        weights[_HEAD] = head if ids is None else head[ids]
    if ids is not None:
        weights["ids"] = ids.int()
    _check_widths(weights, description)
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, new / WEIGHTS)
    told = {
        "model_type": loading.HEAD_TYPE,
        "architectures": ["EagleHead"],
        "vocab_size": len(weights[_EMBEDDING]),
        "head": asdict(description),
    }
    (new / "config.json").write_text(json.dumps(told, indent=2), encoding="utf-8")
    loading.copy_tokenizer(target, new)


def _check_widths(weights: dict[str, torch.Tensor], description: HeadDescription) -> None:
    width, vocab = weights["fc.weight"].shape[0], len(weights[_EMBEDDING])
    for name in (_EMBEDDING, _HEAD):
        if weights[name].shape[1] != width:
            raise ConfigError(
                f"{name} is {list(weights[name].shape)}, but the draft head is {width} wide; a head of another width "
                f"than its target ({description.target_width}) must bring its own"
            )
    ids = weights.get("ids")
    rows = len(weights[_HEAD])
    if ids is None and rows != vocab:
        raise ConfigError(f"lm_head.weight has {rows} rows for {vocab} ids, and no d2t says which ids they are")
    if ids is not None and (
        len(ids) != rows or len(set(ids.tolist())) < rows or not 0 <= ids.min() <= ids.max() < vocab
    ):
        raise ConfigError(f"d2t maps {len(ids)} places to ids below {vocab} for {rows} rows of lm_head.weight: no fit")


def _of_target(folder: Path, names: Iterable[str]) -> torch.Tensor:
    """The first of these tensors that the target's folder has. Raises ConfigError."""
    for name in names:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118
                    tensor: torch.Tensor = file.get_tensor(name)
                    return tensor
    raise ConfigError(f"{folder} has none of {', '.join(names)}, which the draft head is to share")
