"""Placement: what a pipeline asks of a cluster, and when it says that it can never be had."""

from __future__ import annotations

from typing import Any

import pytest

from specserve import config as configs
from specserve.cluster.placement import Placement, plan
from specserve.errors import ConfigError


def placed(nodes: list[dict[str, float]], *, with_draft: bool = True, **overrides: Any) -> Placement:
    tree = configs.override({}, {name.replace("__", "."): value for name, value in overrides.items()})
    return plan(configs.parse(tree), with_draft=with_draft, nodes=nodes)


def test_a_laptop_has_three_cpu_bundles():
    """Without GPUs each actor has a bundle with CPUs only, on one node if the strategy allows."""
    placement = placed([{"CPU": 4}])
    assert placement.roles == ("coordinator", "target", "draft")
    assert placement.bundles == ({"CPU": 0.5}, {"CPU": 1.0}, {"CPU": 1.0})
    assert placement.strategy == "PACK"


def test_without_a_draft_worker_there_is_no_bundle_for_it():
    """A model-free speculator needs two bundles."""
    assert placed([{"CPU": 2}], with_draft=False).roles == ("coordinator", "target")


def test_two_gpus_go_one_to_each_worker():
    """With `auto` devices both workers take a whole GPU."""
    placement = placed([{"CPU": 4, "GPU": 1}, {"CPU": 4, "GPU": 1}])
    assert [placement.on_gpu(role) for role in placement.roles] == [False, True, True]


def test_a_single_gpu_goes_to_the_target():
    """With one GPU and `auto` devices the draft stays on the CPU."""
    placement = placed([{"CPU": 8, "GPU": 1}])
    assert (placement.on_gpu("target"), placement.on_gpu("draft")) == (True, False)


def test_cpu_by_choice_leaves_gpus_alone():
    """A worker with device cpu asks for no GPU."""
    placement = placed([{"CPU": 8, "GPU": 2}], target__device="cpu")
    assert (placement.on_gpu("target"), placement.on_gpu("draft")) == (False, True)


@pytest.mark.parametrize(
    ("nodes", "overrides"),
    [
        pytest.param([{"CPU": 2}], {}, id="too few CPUs"),
        pytest.param([], {}, id="no nodes"),
        pytest.param([{"CPU": 8}], {"target__device": "cuda"}, id="no GPU"),
        pytest.param([{"CPU": 8, "GPU": 1}], {"target__device": "cuda", "draft__model__device": "cuda"}, id="one GPU"),
        pytest.param([{"CPU": 8}, {"CPU": 8}], {"cluster__placement": "STRICT_SPREAD"}, id="two nodes for three"),
        pytest.param([{"CPU": 1}] * 3, {"cluster__placement": "STRICT_PACK"}, id="no node holds all"),
    ],
)
def test_the_impossible_is_refused_with_numbers(nodes, overrides):
    """What the cluster could not hold even when idle is a ConfigError that names both sides."""
    with pytest.raises(ConfigError, match=r"never place.*coordinator 0\.5 CPU.*nodes have"):
        placed(nodes, **overrides)


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_SPREAD"])
def test_small_nodes_together_are_enough(strategy):
    """Bundles may be spread over nodes of which none holds all."""
    assert placed([{"CPU": 1}] * 3, cluster__placement=strategy).strategy == strategy
