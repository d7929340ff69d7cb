"""Placement: what a pipeline asks of a cluster, and when it says that it can never be had."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from specserve import config as configs
from specserve.cluster.placement import Placement, plan, plan_shared, shares_draft
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
        pytest.param([{"CPU": 8}], {"target__resources": {"target_node": 1}}, id="no node of that kind"),
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


KINDS = [{"CPU": 4}, {"CPU": 8, "GPU": 8, "target_node": 1}, {"CPU": 8, "draft_node": 1}]
PINNED = {"target__resources": {"target_node": 1}, "draft__model__resources": {"draft_node": 1}}


def test_resources_pin_workers_to_kinds_of_nodes():
    """Each worker's bundle asks for its own kind; a draft whose nodes have no GPU is not promised one."""
    placement = placed(KINDS, **PINNED)
    assert placement.bundles == ({"CPU": 0.5}, {"CPU": 1, "GPU": 1, "target_node": 1}, {"CPU": 1, "draft_node": 1})


def test_pinned_apart_cannot_be_packed_strictly():
    """The refusal names the resources that no node has together."""
    with pytest.raises(ConfigError, match=r"target 1 CPU \+ 1 target_node.*8 CPU \+ 8 GPU \+ 1 target_node;"):
        placed(KINDS, cluster__placement="STRICT_PACK", **PINNED)


def test_strictly_packed_on_one_gpu_the_draft_stays_on_the_cpu():
    """GPUs of other nodes do not count where all must be on one."""
    placement = placed([{"CPU": 4, "GPU": 1}] * 2, cluster__placement="STRICT_PACK")
    assert (placement.on_gpu("target"), placement.on_gpu("draft")) == (True, False)


def every_way(bundles, nodes, strategy):
    """Whether any assignment of bundles to nodes at all is allowed and fits."""
    for choice in product(range(len(nodes)), repeat=len(bundles)):
        apart = len(set(choice))
        if (strategy == "STRICT_PACK" and apart > 1) or (strategy == "STRICT_SPREAD" and apart < len(bundles)):
            continue
        asked = [Counter() for _ in nodes]
        for bundle, node in zip(bundles, choice, strict=True):
            asked[node].update(bundle)
        if all(asked[n][name] <= node.get(name, 0) for n, node in enumerate(nodes) for name in asked[n]):
            return True
    return False


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_what_is_refused_fits_in_no_way(strategy):
    """Against trying every assignment on 300 random small clusters: the shortcut loses none."""
    rng = random.Random(strategy)
    answers = Counter()
    for _ in range(300):
        nodes = [
            {"CPU": rng.choice([0, 0.5, 1, 1.5, 2, 3]), "GPU": rng.choice([0, 0, 1, 2]), "kind": rng.choice([0, 1])}
            for _ in range(rng.randint(1, 5))
        ]
        devices = {"target__device": rng.choice(["cpu", "cuda"]), "draft__model__device": rng.choice(["cpu", "cuda"])}
        pinned = {"draft__model__resources": {"kind": 1}} if rng.random() < 0.5 else {}
        try:
            placed(nodes, cluster__placement=strategy, **devices, **pinned)
            fits = True
        except ConfigError:
            fits = False
        bundles = [{"CPU": 0.5}]
        bundles += [{"CPU": 1, "GPU": device == "cuda"} for device in devices.values()]
        bundles[-1] |= {"kind": 1} if pinned else {}
        assert fits == every_way(bundles, nodes, strategy), nodes
        answers[fits] += 1
    assert min(answers.values()) > 20


def test_a_thousand_nodes_are_looked_at_in_no_time():
    """What no node can hold is refused without trying a billion assignments."""
    with pytest.raises(ConfigError, match="never place"):
        placed([{"CPU": 8, "GPU": 8}] * 1000, target__resources={"target_node": 1})


def test_the_ranks_of_a_target_share_a_bundle_on_one_node():
    """Under SPREAD too: Ray may tear bundles apart, never one; each rank has its share of it."""
    nodes = [{"CPU": 8, "GPU": 2, "target_node": 1}, {"CPU": 8, "GPU": 1}]
    two = {"target__tensor_parallel": 2, "target__resources": {"target_node": 1}}
    placement = placed(nodes, cluster__placement="SPREAD", **two)
    assert placement.bundles == ({"CPU": 0.5}, {"CPU": 2, "GPU": 2, "target_node": 1}, {"CPU": 1, "GPU": 1})
    assert [placement.seat("target", rank) for rank in (0, 1)] == [(1, {"CPU": 1, "GPU": 1, "target_node": 0.5})] * 2
    assert placement.seat("draft") == (2, {"CPU": 1, "GPU": 1})
    assert placement.workers == ("target", "draft")


def test_ranks_that_may_be_apart_have_bundles_of_their_own():
    """With rank_placement PACK two nodes with a GPU each hold a target of two ranks; kept together it goes to CPUs."""
    nodes = [{"CPU": 4, "GPU": 1}] * 2
    apart = placed(nodes, target__tensor_parallel=2, target__rank_placement="PACK", draft__model__device="cpu")
    assert apart.roles == ("coordinator", "target", "target/1", "draft")
    assert [apart.seat("target", rank) for rank in (0, 1)] == [(1, {"CPU": 1, "GPU": 1}), (2, {"CPU": 1, "GPU": 1})]
    assert not placed(nodes, target__tensor_parallel=2, draft__model__device="cpu").on_gpu("target")
    with pytest.raises(ConfigError, match=r"target 2 CPU \+ 2 GPU"):
        placed(nodes, target__tensor_parallel=2, target__device="cuda")


def test_eight_ranks_apart_on_a_large_cluster_are_refused_in_no_time():
    """Nodes that have the same left are one choice, so that ten bundles on a thousand nodes are looked at quickly."""
    eight = {"target__tensor_parallel": 8, "target__rank_placement": "PACK", "target__device": "cuda"}
    nodes = [{"CPU": 8, "GPU": 1}] * 7 + [{"CPU": 8}] * 1000
    with pytest.raises(ConfigError, match="never place"):
        placed(nodes, **eight)
    assert len(placed([*nodes, {"CPU": 8, "GPU": 1}], draft__model__device="cpu", **eight).bundles) == 10


@pytest.mark.parametrize("resources", [{"CPU": 2}, {"GPU": 1}, {"kind": 0}, {"kind": -1}, {"kind": 1.5}, {"": 1}])
def test_resources_that_cannot_be_asked_for_are_refused(resources):
    """Ray's own names, nothing, negative amounts and uneven counts."""
    with pytest.raises(ConfigError, match=r"target\.resources"):
        placed([{"CPU": 4}], target__resources=resources)


def of(**overrides: Any) -> configs.Config:
    return configs.parse(configs.override({}, {name.replace("__", "."): value for name, value in overrides.items()}))


def test_a_shared_draft_worker_has_a_group_of_its_own():
    """The pipeline's group has no draft in it; under STRICT_PACK the two groups may be on different nodes."""
    for strategy in ("PACK", "STRICT_PACK"):
        pipeline, draft = plan_shared(of(cluster__placement=strategy), [{"CPU": 1.5}, {"CPU": 1}])
        assert (pipeline.roles, draft.roles) == (("coordinator", "target"), ("draft",))
        assert (pipeline.strategy, draft.bundles) == (strategy, ({"CPU": 1.0},))


def test_a_single_gpu_goes_to_the_target_of_those_that_share_a_draft():
    """As with a draft worker of one's own; with two GPUs both have one."""
    for gpus, on_gpus in ((1, [True, False]), (2, [True, True])):
        groups = plan_shared(of(), [{"CPU": 8, "GPU": gpus}])
        assert [group.on_gpu(group.workers[0]) for group in groups] == on_gpus


def test_a_pipeline_and_a_shared_draft_that_do_not_fit_together_are_refused():
    """Each alone would fit; the refusal names all three."""
    with pytest.raises(ConfigError, match=r"never place.*coordinator 0\.5 CPU, target 1 CPU, draft 1 CPU"):
        plan_shared(of(), [{"CPU": 2}])
    with pytest.raises(ConfigError, match="STRICT_SPREAD of coordinator"):
        plan_shared(of(cluster__placement="STRICT_SPREAD"), [{"CPU": 8}])


def test_what_cannot_be_shared_is_refused():
    """No draft worker, too few pipelines for its shares, or plain calls; at depth 0 there is nothing to share."""
    two = {"cluster__pipelines": 2, "cluster__pipelines_per_draft": 2}
    assert shares_draft(of(**two))
    assert not shares_draft(of())
    assert not shares_draft(of(**two, engine__depth=0))
    with pytest.raises(ConfigError, match="ngram has no draft worker"):
        shares_draft(of(**two, draft__speculator="ngram"))
    with pytest.raises(ConfigError, match="shares of the draft worker to nobody: there are at most 1 pipelines"):
        shares_draft(of(cluster__pipelines_per_draft=2))
    with pytest.raises(ConfigError, match="needs transport socket"):
        of(**two, cluster__transport="ray")


@pytest.mark.parametrize(
    ("pipelines", "most", "spare", "each", "workers"), [(2, None, 0, 2, 1), (2, 5, 0, 2, 3), (3, None, 1, 4, 1)]
)
def test_there_is_a_share_for_each_of_the_most_pipelines(pipelines, most, spare, each, workers):
    """Those that load may ask for and those of an update included; draft workers do not scale."""
    cluster = {"pipelines": pipelines, "max_pipelines": most, "spare_pipelines": spare, "pipelines_per_draft": each}
    assert configs.parse({"cluster": cluster}).cluster.draft_workers == workers
