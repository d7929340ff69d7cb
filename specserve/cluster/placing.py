"""Placement groups, and the actors in them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specserve.cluster.actors import CONTROL, WorkerActor
from specserve.cluster.calls import result
from specserve.cluster.placement import TARGET, Placement
from specserve.cluster.worker_ranks import WorkerRanks
from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models.threads import cpu_worker_environment

_NODES_POLL_S = 1.0


async def planned(
    make: Callable[[Sequence[Mapping[str, float]]], Placement], wait_s: float, tell: Callable[[str], None]
) -> Placement:
    """What `make` plans on the nodes there are, or, for wait_s seconds, on those that will have joined.

    tell gets what is waited for. Raises ConfigError as `make` does when the time is over.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return make([node["Resources"] for node in ray.nodes() if node["Alive"]])
        except ConfigError as error:
            if time.monotonic() >= deadline_s:
                raise
            tell(f"waiting for nodes to join: {error.message}")
        await asyncio.sleep(_NODES_POLL_S)


async def place(placement: Placement, timeout_s: float) -> PlacementGroup:
    """The group, once Ray has room for it. Raises ConfigError with what is free when it has none in time."""
    group = placement_group(list(placement.bundles), strategy=placement.strategy)
    try:
        await asyncio.wait_for(result(group.ready()), timeout_s)
    except TimeoutError:
        remove_placement_group(group)
        raise ConfigError(
            f"no room for the {placement.name} within {timeout_s:g} s: {placement.strategy} of "
            f"{list(placement.bundles)}; free resources now: {ray.available_resources()}"
        ) from None
    return group


class Seats:
    """Creates the actors of a placement in its group, each in its bundle."""

    def __init__(self, config: Config, placement: Placement, group: PlacementGroup) -> None:
        self._config = config
        self._placement = placement
        self._group = group

    def create(self, role: str, actor: Callable[..., Any], environment: Mapping[str, str], *, rank: int = 0) -> Any:
        """One actor; Ray starts it again whenever its process dies."""
        index, share = self._placement.seat(role, rank)
        return (
            ray.remote(concurrency_groups={CONTROL: 2})(actor)
            .options(
                num_cpus=share.get("CPU", 0),
                num_gpus=share.get("GPU", 0),
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                runtime_env={"env_vars": dict(environment)},
            )
            .remote(*self._arguments(role), *([rank] if rank else []))
        )

    def create_worker(self, role: str, actor: Callable[..., WorkerActor]) -> WorkerRanks:
        """The processes of a role that holds a model."""
        model = self._config.target if role == TARGET else self._config.draft_model
        size = model.tensor_parallel
        environment: dict[str, str] = {}
        if not self._placement.on_gpu(role):
            environment = cpu_worker_environment(model.threads or max(1, _all_cores() // size))
            if size > 1:
                environment["CUDA_VISIBLE_DEVICES"] = ""  # transformers takes a GPU for granted where it sees one
        return WorkerRanks(role, [self.create(role, actor, environment, rank=rank) for rank in range(size)])

    def _arguments(self, role: str) -> tuple[object, ...]:
        tree = self._config.model_dump()
        if role in self._placement.workers and self._placement.on_gpu(role):
            # Ray shows the process its own GPU only, under the first number.
            section = tree["target"] if role == TARGET else tree["draft"]["model"]
            section["device"] = "cuda"
        return (tree,)


def _all_cores() -> int:
    return max(1, int(max((node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"]), default=1)))
