"""Which actor of a pipeline goes into which bundle, and on which kind of device. Pure: no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

from specserve import drafting
from specserve.config import Config, ModelConfig
from specserve.errors import ConfigError

Bundle = dict[str, float]

COORDINATOR = "coordinator"
TARGET = "target"
DRAFT = "draft"

COORDINATOR_CPUS = 0.5
WORKER_CPUS = 1.0
INGRESS_CPUS = 0.5


def rank_name(role: str, rank: int) -> str:
    """What a process of a role is called; rank 0, which speaks for the others, has the name of the role."""
    return f"{role}/{rank}" if rank else role


def has_draft_worker(config: Config) -> bool:
    """Whether pipelines draft with a worker. Raises ConfigError for an unknown speculator."""
    return config.engine.depth > 0 and drafting.has_worker(config.draft)


def shares_draft(config: Config) -> bool:
    """Whether pipelines share draft workers. Raises ConfigError where they are to, and cannot."""
    cluster = config.cluster
    if cluster.pipelines_per_draft == 1 or config.engine.depth == 0:
        return False
    if not drafting.has_worker(config.draft):
        raise ConfigError(
            f"cluster.pipelines_per_draft is {cluster.pipelines_per_draft}, but speculator {config.draft.speculator} "
            f"has no draft worker that pipelines could share; set it to 1"
        )
    if cluster.pipelines_per_draft > cluster.most_pipelines:
        raise ConfigError(
            f"cluster.pipelines_per_draft {cluster.pipelines_per_draft} leaves shares of the draft worker to nobody: "
            f"there are at most {cluster.most_pipelines} pipelines; lower it, or raise pipelines or max_pipelines"
        )
    return True


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles with the roles that they are for, in order; strategy as Ray names it.

    The ranks of a worker share the bundle of its role, or have a bundle each, which is called after the rank.
    sizes holds how many ranks a role has, where there are several. name says what is placed, for people.
    """

    roles: tuple[str, ...]
    bundles: tuple[Bundle, ...]
    strategy: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    name: str = "pipeline"

    @property
    def workers(self) -> tuple[str, ...]:
        """The roles that hold models."""
        return tuple(role for role in self.roles if role in (TARGET, DRAFT))

    def seat(self, role: str, rank: int = 0) -> tuple[int, Bundle]:
        """The bundle of a process, and what of it the process takes."""
        bundle = self.roles.index(role)
        if rank_name(role, rank) in self.roles:
            bundle = self.roles.index(rank_name(role, rank))
        sharing = 1 if rank_name(role, 1) in self.roles else self.sizes.get(role, 1)
        return bundle, {name: amount / sharing for name, amount in self.bundles[bundle].items()}

    def on_gpu(self, role: str) -> bool:
        """Whether the role's processes have a whole GPU each."""
        return self.bundles[self.roles.index(role)].get("GPU", 0) > 0


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


def plan_shared(config: Config, nodes: Sequence[Mapping[str, float]]) -> tuple[Placement, Placement]:
    """Bundles for a pipeline, and for the draft worker that it shares, which are in a placement group of their own.

    Devices are chosen as in `plan`, for both together. Raises ConfigError likewise.
    """
    strategy = config.cluster.placement
    for on_target, on_draft in product(_gpu_choices(config.target), _gpu_choices(config.draft.model)):
        pipeline = _placement({TARGET: config.target}, [on_target], strategy)
        draft = _placement({DRAFT: config.draft.model}, [on_draft], strategy, with_coordinator=False)
        both = Placement(pipeline.roles + draft.roles, pipeline.bundles + draft.bundles, "PACK")
        if all(_fits(placement, nodes) for placement in (pipeline, draft, both)):
            return pipeline, replace(draft, name="draft worker that pipelines share")
    # Each group keeps its strategy for itself; what the two lack is told by that.
    raise ConfigError(_refusal(replace(both, strategy=strategy), nodes))


def _gpu_choices(model: ModelConfig) -> tuple[bool, ...]:
    """Whether on a GPU, the better choice first."""
    if model.device == "auto":
        return (True, False)
    return (model.device.startswith("cuda"),)


def _placement(
    models: Mapping[str, ModelConfig], on_gpus: Sequence[bool], strategy: str, *, with_coordinator: bool = True
) -> Placement:
    bundles: dict[str, Bundle] = {COORDINATOR: {"CPU": COORDINATOR_CPUS}} if with_coordinator else {}
    sizes = {role: model.tensor_parallel for role, model in models.items() if model.tensor_parallel > 1}
    for (role, model), on_gpu in zip(models.items(), on_gpus, strict=True):
        each = {"CPU": WORKER_CPUS} | ({"GPU": 1.0} if on_gpu else {})
        if model.rank_placement == "STRICT_PACK":
            # One bundle is on one node, whatever the strategy of all of them is.
            bundles[role] = {name: model.tensor_parallel * amount for name, amount in each.items()} | model.resources
        else:
            bundles |= {rank_name(role, rank): each | model.resources for rank in range(model.tensor_parallel)}
    return Placement(tuple(bundles), tuple(bundles.values()), strategy, sizes)


def _fits(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> bool:
    if placement.strategy == "STRICT_PACK":
        everything: Counter[str] = Counter()
        for bundle in placement.bundles:
            everything.update(bundle)
        return any(_holds(node, everything) for node in nodes)
    most = len(placement.bundles)
    choices = [_candidates(bundle, nodes, most) for bundle in placement.bundles]
    free = {node: dict(nodes[node]) for node in sorted(set().union(*choices))}
    return _assignable(placement.bundles, choices, free, apart=placement.strategy == "STRICT_SPREAD")


def _candidates(bundle: Bundle, nodes: Sequence[Mapping[str, float]], most: int) -> list[int]:
    """Nodes that hold this bundle alone. As many as there are bundles are enough: the others cannot take them all."""
    return list(islice((node for node in range(len(nodes)) if _holds(nodes[node], bundle)), most))


def _assignable(
    bundles: Sequence[Bundle], choices: Sequence[Sequence[int]], free: Mapping[int, Mapping[str, float]], *, apart: bool
) -> bool:
    """Whether each bundle can have one of its nodes. Of nodes that have the same left, one is tried."""
    if not bundles:
        return True
    tried = set()
    for node in choices[0]:
        left = tuple(sorted(free.get(node, {}).items()))
        if left in tried or not _holds(free.get(node, {}), bundles[0]):
            continue
        tried.add(left)
        rest = {name: amount - bundles[0].get(name, 0) for name, amount in free[node].items()}
        if _assignable(bundles[1:], choices[1:], {**free, node: {} if apart else rest}, apart=apart):
            return True
    return False


def _holds(node: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(amount <= node.get(name, 0) for name, amount in bundle.items())


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
