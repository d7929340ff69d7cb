"""What a worker will hold on its device, planned before it holds it: weights, KV pages, logits, draft slots, recorded
steps.

On a GPU the KV takes what is left unless it is given a size; on a CPU, whose memory everybody shares, a modest part.
What can never fit is refused with the numbers, before weights are read where their sizes already tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from specserve.config import DraftConfig, EngineConfig, ModelConfig
from specserve.errors import ConfigError

if TYPE_CHECKING:
    import torch

Role = Literal["target", "draft"]

_LOGITS_COPIES = 3
"""Logits as they come, after all options, and as a dist: what a round holds at once of each."""

_GPU_SHARE = {"target": 0.7, "draft": 0.9}
"""Of what is free once the weights are there. Target and draft may share a card, where the target loads first; the
rest is for activations and the allocator's gaps. Who knows better sets kv_memory_gib."""

_CPU_SHARE = 0.25
_CPU_MOST = {"target": 1 << 30, "draft": 1 << 29}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device; free is what it had before the KV was allocated, the weights being there already."""

    free: int
    weights: int
    logits: int
    slots: int
    graphs: int = 0

    @property
    def beside_kv(self) -> int:
        """What is taken besides weights and KV."""
        return self.logits + self.slots + self.graphs

    def kv_room(self, role: Role, device: torch.device) -> int:
        """Bytes for KV where the configuration names neither blocks nor memory."""
        left = max(0, self.free - self.beside_kv)
        if device.type == "cpu":
            return min(_CPU_MOST[role], int(_CPU_SHARE * left))
        return int(_GPU_SHARE[role] * left)

    def with_kv(self, kv: int, role: Role, device: torch.device) -> Mapping[str, int]:
        """Bytes by what they are for. Raises ConfigError where KV and what is beside it exceed what is free."""
        wanted = kv + self.beside_kv
        if wanted > self.free:
            raise ConfigError(
                f"{_of(role)} wants {told(wanted)} beside its weights ({told(kv)} KV, {told(self.logits)} logits, "
                f"{told(self.slots)} draft slots, {told(self.graphs)} recorded steps), and {device} has "
                f"{told(self.free)} free; lower its kv_memory_gib or kv_blocks, engine.max_batch_tokens, or the "
                f"context_length"
            )
        uses = {"weights": self.weights, "kv": kv, "logits": self.logits, "slots": self.slots, "graphs": self.graphs}
        return uses | {"free": self.free}


def plan(
    engine: EngineConfig, vocab_size: int, device: torch.device, weights: int, slots: int, graphs: int = 0
) -> MemoryPlan:
    """What a loaded model needs beside its KV. weights, slots and graphs are bytes."""
    logits = _LOGITS_COPIES * 4 * engine.max_batch_tokens * vocab_size
    return MemoryPlan(free_bytes(device), weights, logits, slots, graphs)


def slot_bytes(draft: DraftConfig, engine: EngineConfig, vocab_size: int) -> int:
    """Bytes of the dists of all draft slots, and of the runners-up that are kept beside each."""
    each = 2 * vocab_size if draft.dist == "dense" else 6 * min(draft.top_k, vocab_size)
    return engine.slot_count * (each + 4 * engine.ranks)


def check_weights(role: Role, weights: int, config: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError when so many bytes of weights do not fit into what the device has free."""
    free = free_bytes(device)
    if weights > free:
        rounded = "" if config.quantization in ("auto", "none") else f" with quantization {config.quantization}"
        raise ConfigError(
            f"{_of(role)}'s weights take {told(weights)} as {config.dtype}{rounded}, and {device} has {told(free)} "
            f"free; use a smaller dtype or model, or another device"
        )


def weight_bytes(folder: Path, config: ModelConfig) -> int:
    """Bytes of a folder's weights in the configured dtype, from the shapes that its files name. Raises ConfigError."""
    return _itemsize(config) * sum(map(prod, _all_shapes(folder).values()))


def held_bytes(folder: Path, config: ModelConfig, device: torch.device) -> int:
    """What stays of them once they are quantised: less where their bytes are what is read. Raises ConfigError.

    A tied head counts as one more matrix, since what is looked up stays as it is.
    """
    from specserve.models import _reduced_head, _rounded_layers

    if config.quantization not in _rounded_layers.KINDS:
        return weight_bytes(folder, config)
    shapes = _all_shapes(folder)
    embeddings = {name: shape for name, shape in shapes.items() if "embed" in name}
    matrices = [shape for name, shape in shapes.items() if len(shape) > 1 and name not in embeddings]
    others = [shape for name, shape in shapes.items() if len(shape) < 2]
    if not any("lm_head" in name for name in shapes) and not (folder / _reduced_head.FILE).is_file():
        matrices += embeddings.values()
    exact = _itemsize(config) * sum(map(prod, [*embeddings.values(), *others]))
    return exact + sum(_rounded_layers.held_bytes(shape, config, device) for shape in matrices)


def arriving_bytes(folder: Path, config: ModelConfig, device: torch.device) -> int:
    """What the device holds at most until they are there: on a CPU, where they are rounded, also all of them exact.

    Raises ConfigError.
    """
    held = held_bytes(folder, config, device)
    return max(held, weight_bytes(folder, config)) if device.type == "cpu" else held


def _itemsize(config: ModelConfig) -> int:
    import torch

    return cast("torch.dtype", getattr(torch, config.dtype)).itemsize


def _all_shapes(folder: Path) -> dict[str, list[int]]:
    return {
        f"{path.name}:{name}": shape for path in folder.glob("*.safetensors") for name, shape in _shapes(path).items()
    }


def _shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of the tensors that a safetensors file names: a length in 8 bytes, then JSON. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: entry["shape"] for name, entry in found.items() if name != "__metadata__"}
    except (OSError, ValueError, AttributeError, KeyError, MemoryError, OverflowError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def free_bytes(device: torch.device) -> int:
    """What a device has free; of a CPU's memory, what the system and the control group of this process leave."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_available(Path("/proc/meminfo")), _group_room(Path("/sys/fs/cgroup")))


def _available(meminfo: Path) -> int:
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _group_room(group: Path) -> int:
    """Of a control group of version 2 with a limit; else more than any machine has."""
    try:
        limit = (group / "memory.max").read_text(encoding="utf-8").strip()
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        return max(0, int(limit) - used)
    except (OSError, ValueError):  # no such group, or the limit is "max"
        return 1 << 62


def told(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


def line(memory: Mapping[str, int], quantization: str = "none") -> str:
    """A worker's memory in a line for people; nothing is known of emulated devices."""
    if not memory:
        return "emulated, no memory to speak of"
    weights = "weights" if quantization == "none" else f"{quantization} weights"
    uses = {"weights": weights, "kv": "kv", "logits": "logits", "slots": "slots"}
    if memory.get("graphs"):
        uses["graphs"] = "recorded steps"
    parts = ", ".join(f"{told(memory[use])} {name}" for use, name in uses.items())
    return f"{parts}; {told(memory['free'])} were free beside the weights"


def _of(role: Role) -> str:
    return f"the {role}"
