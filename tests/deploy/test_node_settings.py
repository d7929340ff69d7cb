"""Every node that the project starts has what Ray is told there: see `SETTINGS`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from shipped import CLUSTERS, ROOT, read

from specserve.cluster import local_ray

SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray by itself starts actors at niceness 15
    "RAY_JEMALLOC_PROFILE": "raylet",
    "RAY_JEMALLOC_CONF": "tcache:false",  # with it, each thread of Ray's node process keeps what it frees
}

each_setting = pytest.mark.parametrize(("name", "value"), SETTINGS.items())


def shell_of_a_node(home: str, name: str) -> str:
    """What a login shell says of the variable on a machine that setup-node.sh has set up."""
    script = f"source {ROOT / 'deploy' / 'node-env.sh'}; printenv {name}"
    run = {"HOME": home, "PATH": "/usr/bin:/bin"}
    return subprocess.run(["bash", "-euc", script], check=True, env=run, capture_output=True, text=True).stdout.strip()


@each_setting
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_ray_up_starts_ray_in_shells_with_the_setting(cluster, name, value, tmp_path):
    """The setup has ~/.bashrc read node-env.sh, which Ray's start commands are run behind and do not overrule."""
    found = read(cluster)
    assert any("setup-node.sh" in command for command in found["setup_commands"])
    setup = (ROOT / "deploy" / "setup-node.sh").read_text(encoding="utf-8")
    assert 'line="source $source_folder/deploy/node-env.sh"' in setup
    assert shell_of_a_node(str(tmp_path), name) == value
    starts = [*found["head_start_ray_commands"], *found["worker_start_ray_commands"]]
    assert sum("ray start" in command for command in starts) == 2
    assert not any(name in command for command in starts)


@each_setting
def test_every_container_has_the_setting(name, value):
    """The image says so, and nothing that starts Ray in it says otherwise."""
    lines = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8").splitlines()
    assert any(re.search(rf"\b{name}={value}(\s|$)", line) for line in lines if line.startswith("ENV "))
    services = read("deploy/compose.yaml")["services"]
    own = [one for one in services.values() if one["image"].startswith("specserve:")]
    assert len(own) == 4
    assert not any(name in one["environment"] for one in own)


def pods() -> Iterator[dict]:
    for name in ("raycluster", "rayservice"):
        spec = read(f"deploy/kuberay/{name}.yaml")["spec"]
        cluster = spec.get("rayClusterConfig", spec)
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield group["template"]["spec"]["containers"][0]


@each_setting
def test_every_pod_has_the_setting(name, value):
    """Whatever image it is of: three pods in each of two manifests."""
    found = list(pods())
    assert len(found) == 6
    assert all({"name": name, "value": value} in pod["env"] for pod in found)


@each_setting
def test_the_local_launcher_gives_the_setting(name, value, monkeypatch):
    """As the variables of its raylet say."""
    for each in SETTINGS:
        monkeypatch.delenv(each, raising=False)
    assert local_ray._variables("/nowhere")[name] == value


@pytest.mark.parametrize("name", ["RAY_JEMALLOC_PROFILE", "RAY_JEMALLOC_CONF"])
def test_who_tells_the_allocator_something_else_is_left_alone(name, monkeypatch):
    """Ray's own way to profile memory: half of each would be neither."""
    for each in SETTINGS:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "gcs_server")
    assert not {each for each in local_ray._variables("/nowhere") if "JEMALLOC" in each}


@pytest.mark.ray
@pytest.mark.full
def test_ray_reads_the_variables_by_these_names():
    """The local launcher's Ray: an actor has the priority of who started it, and the node's allocator is told."""
    program = (
        "import os, ray\n"
        "from pathlib import Path\n"
        "from specserve.cluster import processes\n"
        "from specserve.cluster.local_ray import local_ray\n"
        "with local_ray():\n"
        "    nice = ray.remote(num_cpus=0)(lambda: os.getpriority(os.PRIO_PROCESS, 0)).remote()\n"
        "    of = {Path(f'/proc/{one.pid}/comm').read_text().strip(): one.pid for one in processes.descendants()}\n"
        "    told = Path(f'/proc/{of[\"raylet\"]}/environ').read_text().split('\\0')\n"
        "    print(ray.get(nice), os.getpriority(os.PRIO_PROCESS, 0), 'MALLOC_CONF=tcache:false' in told)\n"
    )
    run = {name: value for name, value in os.environ.items() if "JEMALLOC" not in name} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=run, capture_output=True, text=True, check=True)
    actor, own, told = done.stdout.splitlines()[-1].split()
    assert actor == own
    assert told == "True"
