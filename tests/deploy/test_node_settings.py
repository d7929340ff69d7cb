"""Every node that the project starts gives its actors ordinary priority; Ray by itself starts them at niceness 15."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from shipped import CLUSTERS, ROOT, read

from specserve.cluster import local_ray

NAME = "RAY_worker_niceness"


def shell_of_a_node(home: str) -> str:
    """What a login shell says of the variable on a machine that setup-node.sh has set up."""
    script = f'source {ROOT / "deploy" / "node-env.sh"}; echo "${NAME}"'
    run = {"HOME": home, "PATH": "/usr/bin:/bin"}
    return subprocess.run(["bash", "-euc", script], check=True, env=run, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_up_starts_ray_in_shells_with_ordinary_priority(name, tmp_path):
    """The setup has ~/.bashrc read node-env.sh, which Ray's start commands are run behind and do not overrule."""
    found = read(name)
    assert any("setup-node.sh" in command for command in found["setup_commands"])
    setup = (ROOT / "deploy" / "setup-node.sh").read_text(encoding="utf-8")
    assert 'line="source $source_folder/deploy/node-env.sh"' in setup
    assert shell_of_a_node(str(tmp_path)) == "0"
    starts = [*found["head_start_ray_commands"], *found["worker_start_ray_commands"]]
    assert sum("ray start" in command for command in starts) == 2
    assert not any(NAME in command for command in starts)


def test_every_container_has_ordinary_priority():
    """The image says so, and nothing that starts Ray in it says otherwise."""
    lines = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8").splitlines()
    assert any(re.search(rf"\b{NAME}=0\b", line) for line in lines if line.startswith("ENV "))
    services = read("deploy/compose.yaml")["services"]
    own = [one for one in services.values() if one["image"].startswith("specserve:")]
    assert len(own) == 4
    assert not any(NAME in one["environment"] for one in own)


def pods() -> Iterator[dict]:
    for name in ("raycluster", "rayservice"):
        spec = read(f"deploy/kuberay/{name}.yaml")["spec"]
        cluster = spec.get("rayClusterConfig", spec)
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield group["template"]["spec"]["containers"][0]


def test_every_pod_has_ordinary_priority():
    """Whatever image it is of: three pods in each of two manifests."""
    found = list(pods())
    assert len(found) == 6
    assert all({"name": NAME, "value": "0"} in pod["env"] for pod in found)


def test_the_local_launcher_gives_ordinary_priority():
    """As the variables of its raylet say."""
    assert local_ray._QUIET[NAME] == "0"


@pytest.mark.ray
@pytest.mark.full
def test_ray_reads_the_variable_by_this_name():
    """An actor of the local launcher's Ray has the priority of the process that started it."""
    program = (
        "import os, ray\n"
        "from specserve.cluster.local_ray import local_ray\n"
        "with local_ray():\n"
        "    nice = ray.remote(num_cpus=0)(lambda: os.getpriority(os.PRIO_PROCESS, 0)).remote()\n"
        "    print(ray.get(nice), os.getpriority(os.PRIO_PROCESS, 0))\n"
    )
    run = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=run, capture_output=True, text=True, check=True)
    actor, own = done.stdout.splitlines()[-1].split()
    assert actor == own
