"""From a configured source to a plain folder, and from a folder to a torch model.

A source is `demo`, `emulated` (no weights at all), a folder with safetensors weights, a .gguf file, which is
dequantised once into a cache folder, or a folder that holds the trained part of a draft only, or a draft head, which
is put together with its target's parts once.
Nothing here waits for a network, unpickles weights or runs code from a model folder unless the configuration says so.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from specserve.config import DEMO, DEMO_HEAD, ModelConfig
from specserve.errors import ConfigError
from specserve.models import Backend, _reduced_head, _rounded_layers
from specserve.models._progress_bars import without_bars

if TYPE_CHECKING:
    from specserve.models._ranks import RankGroup

Progress = Callable[[str], None]
Role = Literal["target", "draft"]

PAGED, RECURRENT, EMULATED, HEAD = "paged_transformers", "recurrent_transformers", "emulated", "eagle"
TRANSLATED = "other_vocabulary"

HEAD_TYPE = "specserve_eagle"
"""The model type of a draft head that was put together with its target's parts."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

_GGUF_BEGINS = b"GGUF"

_DEMO = "specserve.demo"  # a source of models that itself builds on this module, so it is reached by name


def prepare(config: ModelConfig, progress: Progress, *, role: Role = "target") -> Path:
    """The folder with config.json, weights and tokenizer of a source; builds or converts it where needed.

    `role` matters to the sources `demo` and `emulated`, which have a target and a draft. `progress` gets lines for
    people. Raises ConfigError that says what is missing or wrong.
    """
    if config.vocabulary == "intersection" and config.target is not None:
        from specserve.models import _other_vocabulary

        target = prepare(config.model_copy(update={"source": config.target, "target": None}), progress)
        return _other_vocabulary.translated(_prepared(config, progress, role), target, progress)
    return _prepared(config, progress, role)


def _prepared(config: ModelConfig, progress: Progress, role: Role) -> Path:
    """The folder of a source with its own vocabulary."""
    if config.source == DEMO:
        built: Path = getattr(import_module(_DEMO), role)(progress)
        return built
    if config.source == EMULATED:
        from specserve.models import emulated

        return emulated.folder(role)
    check_source(config)
    path = source_path(config)
    if path.is_file():
        from specserve.models._gguf import converted

        return converted(path, progress)
    from specserve.models import _head_folder, trained_draft

    if trained_draft.is_trained_draft(path):
        return trained_draft.completed(path, progress)
    if _head_folder.is_head(path, config):
        return _head_folder.completed(path, config, progress)
    check_folder(path, config)
    return path


def check_source(config: ModelConfig) -> None:
    """Raise ConfigError for a source that is nowhere, or a file of another kind. Nothing is built or converted."""
    if config.source == DEMO:
        import_module(_DEMO).check()
        return
    if config.source == EMULATED:
        return
    path = source_path(config)
    if not path.exists():
        raise ConfigError(
            f"there is no model at {config.source!r}: expected `demo`, `emulated`, a folder, or a .gguf file. "
            f"Models are not downloaded; fetch the folder first and give its path"
        )
    if path.is_file():
        _check_file(path)


def _check_file(path: Path) -> None:
    """Raise ConfigError for a file that is no GGUF file by its name or by how it begins."""
    if path.suffix.lower() != ".gguf":
        raise ConfigError(f"{path} is a file but not a .gguf file; give the folder that holds the model instead")
    try:
        with path.open("rb") as file:
            begins = file.read(len(_GGUF_BEGINS))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if begins != _GGUF_BEGINS:
        raise ConfigError(f"{path} is called .gguf, but does not begin as such files do; was it copied completely?")


def is_converted(config: ModelConfig) -> bool:
    """Whether a source is put into a folder of its own by a conversion that takes long at first use."""
    demo_head = config.source == DEMO_HEAD and config.target is not None
    return config.source == DEMO or demo_head or source_path(config).is_file()


def source_path(config: ModelConfig) -> Path:
    """Where a source that names a file or folder is, which need not be there."""
    if config.source == DEMO_HEAD:
        head: Path = import_module(_DEMO).HEAD
        return head
    return Path(config.source).expanduser()


def check_folder(folder: Path, config: ModelConfig) -> None:
    """Raise ConfigError unless the folder holds a causal model that may be loaded under this configuration."""
    described = read_model_config(folder)
    if not described.get("architectures") and not described.get("auto_map"):
        raise ConfigError(f"{folder / 'config.json'} names no `architectures`; it does not say which model this is")
    if described.get("auto_map") and not config.trust_remote_code:
        raise ConfigError(
            f"{folder} brings its own Python code (auto_map in config.json); "
            f"set trust_remote_code only if you have read it and trust it"
        )
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if not pickles:
        raise ConfigError(f"{folder} holds no *.safetensors weights")
    if not config.allow_pickle_weights:
        raise ConfigError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when loaded; "
            f"convert them to safetensors or set allow_pickle_weights"
        )


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ConfigError when it is missing or not JSON."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(described, dict):
        raise ConfigError(f"{path} holds a {type(described).__name__}, expected an object")
    return described


def copy_tokenizer(folder: Path, new: Path) -> None:
    """Give a new model folder the tokenizer of another one, and what else it says about texts."""
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, new / name)


def logits_width(folder: Path) -> int:
    """Ids that a model folder's logits have places for, as it tells itself. Raises ConfigError."""
    from specserve.models import _other_vocabulary

    if _other_vocabulary.is_translated(folder):
        return len(_other_vocabulary.read(folder)[0])
    return int(read_model_config(folder)["vocab_size"])


def device_of(config: ModelConfig) -> torch.device:
    """The configured device; `auto` is CUDA where there is any. Raises ConfigError for a device that is not there."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {config.device!r}: {error}") from None
    visible = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= visible:
        found = f"{visible} CUDA devices are visible" if visible else "no CUDA device is visible"
        highest = f", or a number up to cuda:{visible - 1}" if visible else ""
        raise ConfigError(f"device {config.device!r} is not there: {found}; use auto or cpu{highest}")
    if device.type not in ("cpu", "cuda"):
        _check_holds_tensors(device)
    return device


def _check_holds_tensors(device: torch.device) -> None:
    """Raise ConfigError for a device that this torch or machine has nothing behind."""
    try:
        torch.zeros(1, device=device).cpu()
    except Exception as error:  # each kind of device says so in its own way
        reason = "it holds no values" if device.type == "meta" else str(error).partition("\n")[0]
        raise ConfigError(
            f"device {str(device)!r} is not there: {reason}; use auto, or see `specserve check`"
        ) from None


def load_model(folder: Path, config: ModelConfig, attention: str = "sdpa", ranks: RankGroup | None = None) -> Any:
    """The folder's causal model in eval mode, with the configured dtype and quantization, on the configured device.

    `attention` is a name in transformers' attention interface. With `ranks` it is this rank's part only.

    Raises ConfigError when the folder cannot be loaded, lacks weights that the model needs, or describes a model of
    another kind.
    """
    check_folder(folder, config)
    device = device_of(config)
    model = _from_pretrained(folder, config, attention, {} if ranks is None else _shared_out(ranks.size))
    if ranks is not None:
        from specserve.models import _shards

        _shards.put_in_place(model, ranks)
    _reduced_head.put_in_place(model, folder)
    if config.quantization in ("int8", "fp8"):
        _rounded_layers.round_weights(model, config.quantization, device)
    return model.eval().requires_grad_(False).to(device)


def load_model_config(folder: Path, config: ModelConfig) -> Any:
    """The folder's transformers configuration. Raises ConfigError when transformers does not know it."""
    from transformers import AutoConfig

    read_model_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever a wrong config.json provokes is a wrong configuration
        raise ConfigError(f"transformers cannot read {folder / 'config.json'}: {_told(error)}") from None


def backend_of(folder: Path, config: ModelConfig) -> str:
    """The file in `models/` that serves this folder: what its layers keep decides. Raises ConfigError."""
    if config.source == EMULATED:
        return EMULATED
    if read_model_config(folder).get("model_type") == HEAD_TYPE:
        return HEAD
    from specserve.models import _other_vocabulary

    if _other_vocabulary.is_translated(folder):
        return TRANSLATED
    from specserve.models._refusals import is_recurrent

    return RECURRENT if is_recurrent(load_model_config(folder, config)) else PAGED


def _shared_out(size: int) -> dict[str, Any]:
    """What lets transformers read this rank's part of each weight, by its own plan for the model."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size)}


def _from_pretrained(folder: Path, config: ModelConfig, attention: str, more: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with without_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, config.dtype),
                attn_implementation=attention,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=not config.allow_pickle_weights or any(folder.glob("*.safetensors")),
                weights_only=True,
                local_files_only=True,
                output_loading_info=True,
                **more,
            )
    except Exception as error:  # corrupt weights, shapes that do not fit, unknown architectures: one thing to a user
        raise ConfigError(f"cannot load the model in {folder}: {_told(error)}") from None
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would go on with random values in their place.
        raise ConfigError(f"{folder} lacks {len(missing)} weights that the model needs, such as {missing[0]}")
    return model


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"


def derive_blocks(config: ModelConfig, backend: Backend, block_tokens: int, rows: int, room: int) -> int:
    """Number of KV blocks: `kv_blocks`, or as many as `kv_memory_gib` holds, or else as many as `room` bytes hold.

    A model that keeps nothing per position gets bare numbers, enough for `rows` sequences of the full context.

    Raises ConfigError with the numbers when they cannot hold one sequence of the full context.
    """
    each = backend.bytes_per_block(block_tokens)
    needed = -(-backend.context_length // block_tokens)
    memory = room if config.kv_memory_gib is None else config.kv_memory_gib * 2**30
    affordable = int(memory // each) if each else needed * rows
    blocks = config.kv_blocks if config.kv_blocks is not None else affordable
    if blocks < needed:
        free = f"what memory is free leaves {room / 2**30:.3f} GiB for KV, which"
        origin = free if config.kv_memory_gib is None else f"kv_memory_gib {config.kv_memory_gib}"
        origin = "kv_blocks" if config.kv_blocks is not None else origin
        raise ConfigError(
            f"{origin} gives {blocks} KV blocks of {block_tokens} positions ({each / 2**20:.2f} MiB each), but one "
            f"sequence of the full context of {backend.context_length} positions needs {needed} "
            f"({needed * each / 2**30:.3f} GiB); raise it or set a smaller context_length"
        )
    return blocks


def apply_threads(threads: int) -> None:
    """Use this many CPU threads in torch's operators; 0 leaves torch's own choice."""
    if threads > 0:
        torch.set_num_threads(threads)


def place_of(device: torch.device) -> str:
    """Which hardware a device is, told apart from that of other machines and processes."""
    host = socket.gethostname()
    if device.type != "cuda":
        return f"{host} {device.type}"
    return f"{host} {torch.cuda.get_device_properties(device).uuid}"
