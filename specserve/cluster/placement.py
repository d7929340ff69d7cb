"""Which actor of a pipeline goes into which bundle, and on which kind of device. Pure: no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from specserve.config import Config, ModelConfig
from specserve.errors import ConfigError

Bundle = dict[str, float]

COORDINATOR = "coordinator"
TARGET = "target"
DRAFT = "draft"

COORDINATOR_CPUS = 0.5
WORKER_CPUS = 1.0
INGRESS_CPUS = 0.5


@dataclass(frozen=True, slots=True)
class Placement:
    """One bundle per role, in the order of `roles`; strategy as Ray names it."""

    roles: tuple[str, ...]
    bundles: tuple[Bundle, ...]
    strategy: str

    def index(self, role: str) -> int:
        """The bundle of a role."""
        return self.roles.index(role)

    def on_gpu(self, role: str) -> bool:
        """Whether the role has a whole GPU."""
        return self.bundles[self.index(role)].get("GPU", 0) > 0


def plan(config: Config, *, with_draft: bool, nodes: Sequence[Mapping[str, float]]) -> Placement:
    """Bundles for one pipeline on nodes with these total resources (`CPU`, `GPU`, and what they were started with).

    A worker whose device is `auto` gets a GPU where that can be placed, the target first. Resources that a model names
    pin it to nodes of that kind, under any strategy. Raises ConfigError with the numbers if the nodes could not hold
    the pipeline even when idle.
    """
    models = {TARGET: config.target} | ({DRAFT: config.draft.model} if with_draft else {})
    for on_gpus in product(*(_gpu_choices(model) for model in models.values())):
        placement = _placement(models, on_gpus, config.cluster.placement)
        if _fits(placement, nodes):
            return placement
    raise ConfigError(_refusal(placement, nodes))


def _gpu_choices(model: ModelConfig) -> tuple[bool, ...]:
    """Whether on a GPU, the better choice first."""
    if model.device == "auto":
        return (True, False)
    return (model.device.startswith("cuda"),)


def _placement(models: Mapping[str, ModelConfig], on_gpus: Sequence[bool], strategy: str) -> Placement:
    bundles: dict[str, Bundle] = {COORDINATOR: {"CPU": COORDINATOR_CPUS}}
    for (role, model), on_gpu in zip(models.items(), on_gpus, strict=True):
        bundles[role] = {"CPU": WORKER_CPUS} | ({"GPU": 1.0} if on_gpu else {}) | model.resources
    return Placement(tuple(bundles), tuple(bundles.values()), strategy)


def _fits(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> bool:
    return any(_holds(choice, placement.bundles, nodes) for choice in _choices(placement, nodes))


def _choices(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> Iterator[tuple[int, ...]]:
    """Nodes by bundle, as the strategy allows them; few enough to look at all of them in a cluster of any size."""
    count = len(placement.bundles)
    if placement.strategy == "STRICT_PACK":
        return ((node,) * count for node in range(len(nodes)))
    everything = product(*(_candidates(bundle, nodes, count) for bundle in placement.bundles))
    if placement.strategy == "STRICT_SPREAD":
        return (choice for choice in everything if len(set(choice)) == count)
    return everything


def _candidates(bundle: Bundle, nodes: Sequence[Mapping[str, float]], most: int) -> list[int]:
    """Nodes that hold this bundle alone. As many as there are bundles are enough: the others cannot take them all."""
    return list(islice((node for node in range(len(nodes)) if _holds((node,), [bundle], nodes)), most))


def _holds(choice: tuple[int, ...], bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> bool:
    for node in set(choice):
        asked: Counter[str] = Counter()
        for bundle, chosen in zip(bundles, choice, strict=True):
            if chosen == node:
                asked.update(bundle)
        if any(amount > nodes[node].get(name, 0) for name, amount in asked.items()):
            return False
    return True


def _refusal(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> str:
    names = list(dict.fromkeys(["CPU", "GPU", *(name for bundle in placement.bundles for name in bundle)]))
    asked = ", ".join(f"{role} {_shown(b, names)}" for role, b in zip(placement.roles, placement.bundles, strict=True))
    have = "; ".join(_shown(node, names) for node in nodes) or "no nodes"
    return (
        f"the cluster can never place this pipeline: {placement.strategy} of {asked}, but its nodes have {have}. "
        "Change cluster.placement or the devices and resources of target and draft.model, or add nodes"
    )


def _shown(resources: Mapping[str, float], names: Sequence[str]) -> str:
    return " + ".join(f"{resources[name]:g} {name}" for name in names if resources.get(name)) or "none"
