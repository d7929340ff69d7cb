"""Kubernetes manifests: valid for KubeRay's published definitions, and what they name is there."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from shipped import ROOT, Node, errors, kuberay_schema, placed, pod_schema, read

FOLDER = "deploy/kuberay"
CLUSTERS = {"RayService": f"{FOLDER}/rayservice.yaml", "RayCluster": f"{FOLDER}/raycluster.yaml"}


def redis() -> dict[str, Any]:
    """The parts of redis.yaml by kind."""
    text = (ROOT / FOLDER / "redis.yaml").read_text(encoding="utf-8")
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


def cluster_of(kind: str) -> dict[str, Any]:
    spec = read(CLUSTERS[kind])["spec"]
    return spec["rayClusterConfig"] if kind == "RayService" else spec


@pytest.mark.parametrize("kind", CLUSTERS)
def test_a_manifest_fits_kuberays_definition(kind):
    """No wrong type, nothing missing, no field that the API server would drop."""
    found = read(CLUSTERS[kind])
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", kind)
    assert errors(kuberay_schema(kind), found) == []


def misspelt(found: Any) -> None:
    found["headGroupSpec"]["templat"] = found["headGroupSpec"].pop("template")


def wrong_type(found: Any) -> None:
    found["workerGroupSpecs"][0]["rayStartParams"]["num-gpus"] = 1


def deep(found: Any) -> None:
    found["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]["image_pull"] = "Always"


def wrong_word(found: Any) -> None:
    found["authOptions"]["mode"] = "on"


@pytest.mark.parametrize("mistake", [misspelt, wrong_type, deep, wrong_word], ids=lambda change: change.__name__)
def test_a_wrong_manifest_is_found(mistake):
    """The closed definition can say no, at any depth."""
    found = copy.deepcopy(read(CLUSTERS["RayCluster"]))
    mistake(found["spec"])
    assert errors(kuberay_schema("RayCluster"), found)


def test_both_manifests_describe_the_same_cluster():
    """One was not changed without the other."""
    assert cluster_of("RayService") == cluster_of("RayCluster")


def test_the_ray_version_is_the_installed_one():
    """KubeRay chooses by it how to start Ray."""
    (pinned,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert cluster_of("RayService")["rayVersion"] == pinned


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def node_of(group: dict[str, Any]) -> Node:
    """The resources of a pod, as Ray will count them."""
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    own = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
    return {"CPU": float(limits["cpu"]), "GPU": limits.get("nvidia.com/gpu", 0)} | own


def test_the_application_is_placed_on_the_pods_that_the_manifest_makes():
    """The embedded Serve file is valid, and its target and draft each find a GPU of their kind."""
    serve = yaml.safe_load(read(CLUSTERS["RayService"])["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(serve)
    placement = placed(serve["applications"][0]["args"], [node_of(group) for group in groups(cluster_of("RayService"))])
    assert (placement.on_gpu("target"), placement.on_gpu("draft")) == (True, True)
    # Pods join one by one, after the application was deployed.
    assert serve["applications"][0]["args"]["cluster"]["wait_for_nodes_s"] > 0


def test_models_are_mounted_where_the_application_looks_for_them():
    """On every pod, since the head reads the tokenizer there."""
    args = yaml.safe_load(read(CLUSTERS["RayService"])["spec"]["serveConfigV2"])["applications"][0]["args"]
    for group in groups(cluster_of("RayService")):
        (container,) = group["template"]["spec"]["containers"]
        (mount,) = container["volumeMounts"]
        assert {volume["name"] for volume in group["template"]["spec"]["volumes"]} == {mount["name"]}
        for source in (args["target"]["source"], args["draft"]["model"]["source"]):
            assert source.startswith(f"{mount['mountPath']}/")


def test_tokens_are_asked_for_and_pods_have_no_privileges():
    """Authentication is on; every pod runs as a user of its own, with the keys from a secret."""
    cluster = cluster_of("RayService")
    assert cluster["authOptions"]["mode"] == "token"
    for group in groups(cluster):
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["containers"][0]["envFrom"] == [{"secretRef": {"name": "specserve-keys"}}]


def test_redis_is_where_the_head_looks_for_it():
    """Service, port, password and selector of redis.yaml agree with the fault tolerance of the head and each other."""
    found = redis()
    options = cluster_of("RayService")["gcsFaultToleranceOptions"]
    (port,) = found["Service"]["spec"]["ports"]
    assert options["redisAddress"] == f"{found['Service']['metadata']['name']}:{port['port']}"
    template = found["Deployment"]["spec"]["template"]
    assert errors(pod_schema(), template) == []
    assert found["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    assert container["env"][0]["valueFrom"] == options["redisPassword"]["valueFrom"]
    (volume,) = template["spec"]["volumes"]
    claim = found["PersistentVolumeClaim"]["metadata"]["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    broken = copy.deepcopy(template)
    broken["spec"]["containers"][0]["volumeMount"] = []
    assert errors(pod_schema(), broken)
