"""Which actor of a pipeline goes into which bundle, and on which kind of device. Pure: no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

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
    """Bundles for one pipeline on nodes with these total resources (`CPU`, `GPU`, …).

    A worker whose device is `auto` gets a GPU while there is one, the target first. Raises ConfigError with the
    numbers if the nodes could not hold the pipeline even when idle.
    """
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    models = {TARGET: config.target} | ({DRAFT: config.draft.model} if with_draft else {})
    bundles: dict[str, Bundle] = {COORDINATOR: {"CPU": COORDINATOR_CPUS}}
    for role, model in models.items():
        wants_gpu = _wants_gpu(model, gpus_left=gpus)
        gpus -= wants_gpu
        bundles[role] = {"CPU": WORKER_CPUS} | ({"GPU": 1.0} if wants_gpu else {})
    placement = Placement(tuple(bundles), tuple(bundles.values()), config.cluster.placement)
    if not _fits(placement, nodes):
        raise ConfigError(_refusal(placement, nodes))
    return placement


def _wants_gpu(model: ModelConfig, gpus_left: int) -> bool:
    if model.device == "auto":
        return gpus_left > 0
    return model.device.startswith("cuda")


def _fits(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> bool:
    return any(_holds(choice, placement.bundles, nodes) for choice in _choices(placement, len(nodes)))


def _choices(placement: Placement, nodes: int) -> Iterator[tuple[int, ...]]:
    """Nodes by bundle, as the strategy allows them. A pipeline has at most three bundles."""
    count = len(placement.bundles)
    if placement.strategy == "STRICT_PACK":
        return ((node,) * count for node in range(nodes))
    everything = product(range(nodes), repeat=count)
    if placement.strategy == "STRICT_SPREAD":
        return (choice for choice in everything if len(set(choice)) == count)
    return everything


def _holds(choice: tuple[int, ...], bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> bool:
    for node in set(choice):
        for resource in ("CPU", "GPU"):
            asked = sum(
                bundle.get(resource, 0) for bundle, chosen in zip(bundles, choice, strict=True) if chosen == node
            )
            if asked > nodes[node].get(resource, 0):
                return False
    return True


def _refusal(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> str:
    asked = ", ".join(f"{role} {_shown(b)}" for role, b in zip(placement.roles, placement.bundles, strict=True))
    have = "; ".join(_shown(node) for node in nodes) or "no nodes"
    return (
        f"the cluster can never place this pipeline: {placement.strategy} of {asked}, but its nodes have {have}. "
        "Change cluster.placement or the devices of target and draft.model, or add nodes"
    )


def _shown(resources: Mapping[str, float]) -> str:
    return " + ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU") if resources.get(name)) or "none"
