"""What the project ships for clusters, parsed, and the published schemas that it has to fit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import ray
import yaml
from jsonschema import Draft7Validator

from specserve import config as configs
from specserve.cluster.placement import Placement, plan

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CLUSTERS = ("cluster.yaml", "deploy/cluster-aws.yaml", "deploy/cluster-gcp.yaml")

Node = dict[str, float]


def read(name: str) -> Any:
    """A shipped YAML file."""
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def ray_cluster_schema() -> Draft7Validator:
    """Of `ray up` files; the Ray wheel's own."""
    return Draft7Validator(json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text()))


def compose_schema() -> Draft7Validator:
    """Of compose files; the Compose Specification's own (github.com/compose-spec, Apache-2.0)."""
    return Draft7Validator(_unpacked("compose-spec"))


def kuberay_schema(kind: str) -> Draft7Validator:
    """Of a KubeRay resource, v1 (github.com/ray-project/kuberay, Apache-2.0), with unknown fields refused."""
    return Draft7Validator(closed(_unpacked(f"kuberay-{kind.lower()}s.v1")))


def pod_schema() -> Draft7Validator:
    """Of a pod template; Kubernetes' own, as KubeRay's definition repeats it."""
    cluster = closed(_unpacked("kuberay-rayclusters.v1"))["properties"]["spec"]["properties"]
    return Draft7Validator(cluster["headGroupSpec"]["properties"]["template"])


def _unpacked(name: str) -> Any:
    return json.loads(gzip.decompress((HERE / f"{name}.json.gz").read_bytes()))


def closed(schema: Any) -> Any:
    """The same schema, with objects that name their properties taking no others, as an API server prunes them."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: closed(part) for name, part in schema.items()}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if named and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def errors(validator: Draft7Validator, found: Any) -> list[str]:
    """What is wrong, by place."""
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(found)]


def placed(args: dict[str, Any], nodes: list[Node]) -> Placement:
    """Where an application with these arguments goes on such nodes. Raises ConfigError."""
    return plan(configs.parse(args), with_draft=True, nodes=nodes)
