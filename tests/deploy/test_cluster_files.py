"""`cluster.yaml` and its variants for clouds: valid for Ray, safe by default, of the kinds that serve.yaml names."""

from __future__ import annotations

import copy
import re
import subprocess
from typing import Any

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config
from shipped import CLUSTERS, ROOT, Node, errors, placed, ray_cluster_schema, read

SERVE_ARGS = read("deploy/serve.yaml")["applications"][0]["args"]
CLOUDS = CLUSTERS[1:]


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_file_fits_rays_schema(name):
    """The wheel's own schema, and Ray's own look at what it made of the file."""
    found = read(name)
    assert errors(ray_cluster_schema(), found) == []
    validate_config(prepare_config(copy.deepcopy(found)))


@pytest.mark.parametrize(
    "mistake",
    [{"worker_nodes": {}}, {"provider": {"region": "x"}}, {"max_workers": -1}, {"setup_commands": "one command"}],
)
def test_a_wrong_cluster_file_is_found(mistake):
    """The schema can say no: an unknown key, no provider type, a negative number, a string for a list."""
    assert errors(ray_cluster_schema(), read("cluster.yaml") | mistake)


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_is_copied_is_there_and_enough_to_install(name):
    """Every local path of the project exists; the package's build reads nothing that is not copied."""
    mounts = read(name)["file_mounts"]
    own = {local for local in mounts.values() if not local.startswith("~")}
    assert all((ROOT / local).exists() for local in own)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'(?:readme = |license-files = \[)"(\w+(?:\.\w+)?)"', project)
    assert {"specserve", "deploy", "constraints.txt", "pyproject.toml", *named} == own


@pytest.mark.parametrize("name", CLUSTERS)
def test_token_and_key_are_copied_and_the_dashboard_stays_on_the_head(name):
    """Authentication is on from the first start; what takes deployments is behind ssh."""
    found = read(name)
    assert {"~/.ray/auth_token", "~/.specserve/api_key"} <= found["file_mounts"].keys()
    assert any("setup-node.sh" in command for command in found["setup_commands"])
    (head,) = (command for command in found["head_start_ray_commands"] if "ray start" in command)
    assert "--dashboard-host=127.0.0.1" in head
    assert "--num-gpus=0" in head
    for command in (head, *found["worker_start_ray_commands"]):
        assert "ray start" not in command or "--metrics-export-port=8080" in command
    assert "export RAY_AUTH_MODE=token\n" in (ROOT / "deploy" / "node-env.sh").read_text()


def nodes_of(found: dict[str, Any]) -> list[Node]:
    """The nodes of a cloud file, as Ray will count them."""
    return [kind["resources"] for kind in found["available_node_types"].values()]


@pytest.mark.parametrize("name", CLOUDS)
def test_the_serve_file_is_placed_on_the_kinds_of_a_cloud_file(name):
    """Target and draft go to GPUs of their own kinds; the head has none; without the draft's kind nothing goes."""
    found = read(name)
    head = found["available_node_types"][found["head_node_type"]]
    assert head["resources"]["GPU"] == 0
    placement = placed(SERVE_ARGS, nodes_of(found))
    assert (placement.on_gpu("target"), placement.on_gpu("draft")) == (True, True)
    with pytest.raises(Exception, match="draft_node"):
        placed(SERVE_ARGS, [node for node in nodes_of(found) if "draft_node" not in node])


def kind_of(address: str) -> str:
    """What the start command of cluster.yaml makes of a machine with this address; the command itself decides."""
    (start,) = (command for command in read("cluster.yaml")["worker_start_ray_commands"] if "ray start" in command)
    stub = f'hostname() {{ echo "{address} "; }}; ulimit() {{ :; }}; ray() {{ printf "%s\\n" "$@"; }}; RAY_HEAD_IP=h; '
    done = subprocess.run(["bash", "-euc", stub + start], check=True, capture_output=True, text=True)
    (resources,) = (line for line in done.stdout.splitlines() if line.startswith("--resources="))
    return resources.removeprefix("--resources=")


def test_machines_have_their_kind_by_their_address():
    """Every worker has one of the names that the Serve file asks for; an address that is only alike has not."""
    first, second = read("cluster.yaml")["provider"]["worker_ips"]
    assert kind_of(first) == '{"target_node": 1000}'
    assert kind_of(f"172.17.0.1 {second}") == '{"draft_node": 1000}'
    assert kind_of(f"{first}0") == '{"spare_node": 1000}'
    nodes = [{"CPU": 4.0}, {"CPU": 8.0, "target_node": 1000.0}, {"CPU": 8.0, "draft_node": 1000.0}]
    assert len(placed(SERVE_ARGS, nodes).bundles) == 3


@pytest.mark.parametrize("name", ["setup-node.sh", "node-env.sh", "end-with-raylet.sh"])
def test_scripts_are_valid_bash(name):
    """As bash itself says."""
    done = subprocess.run(["bash", "-n", str(ROOT / "deploy" / name)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_environment_of_a_node_has_the_key_where_there_is_one(tmp_path):
    """And nothing where there is none; Ray asks for its token in both."""
    script = f'source {ROOT / "deploy" / "node-env.sh"}; echo "$RAY_AUTH_MODE,${{SPECSERVE_API_KEY-none}}"'

    def said() -> str:
        run = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        return subprocess.run(["bash", "-euc", script], check=True, env=run, capture_output=True, text=True).stdout

    assert said() == "token,none\n"
    (tmp_path / ".specserve").mkdir()
    (tmp_path / ".specserve" / "api_key").write_text("first-key,second-key\n")
    assert said() == "token,first-key,second-key\n"


def test_the_setup_refuses_an_old_python(tmp_path):
    """In words, before anything is installed."""
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    run = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(old)}
    command = ["bash", str(ROOT / "deploy" / "setup-node.sh")]
    done = subprocess.run(command, check=False, env=run, capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs Python 3.11" in done.stderr
    assert not (tmp_path / "specserve-venv").exists()
