"""A real `ray up`: three machines of namespaces with ssh servers, cluster.yaml with other addresses and key, a chat."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hosts import Host, cannot, machines

ROOT = Path(__file__).parents[2]
API_KEY = "a-key-of-this-test"
CHANGES = {
    "192.168.1.10": "10.77.0.1",
    "192.168.1.11": "10.77.0.2",
    "192.168.1.12": "10.77.0.3",
    "ssh_user: ubuntu": "ssh_user: root",
}

NODES = """
import json, ray
ray.init("auto", logging_level="ERROR")
print(json.dumps([[node["NodeManagerAddress"], node["Resources"]] for node in ray.nodes()]))
"""

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(cannot() is not None, reason=str(cannot())),
]


@dataclass(frozen=True)
class Site:
    """Where `ray` commands are given: a cluster file, and the home folder with the secrets."""

    cluster: Path
    home: Path
    hosts: list[Host]

    def ray(self, *arguments: str, timeout_s: float = 600, **environment: str) -> str:
        """Run `ray …` as a user would, in the project's folder. Fails with what it said."""
        command = [str(Path(sys.executable).with_name("ray")), *arguments]
        log = self.home / "log"
        with log.open("w") as out:
            done = subprocess.run(
                command,
                check=False,
                cwd=ROOT,
                env=self.environment() | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
        said = log.read_text()
        assert done.returncode == 0, said[-6000:]
        return said

    def environment(self) -> dict[str, str]:
        """A user's shell: nothing of this test process but the path."""
        ray_folder = self.home / "ray"
        return {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "RAY_AUTH_MODE": "token",
            "RAY_TMPDIR": str(ray_folder),
            "TMPDIR": str(self.home),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def shell(self, host: Host, command: str) -> str:
        """Run a command on a machine by ssh, in a shell as the setup leaves it."""
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        ssh = ["ssh", "-i", str(self.home / ".ssh" / "id"), *options, f"root@{host.address}"]
        done = subprocess.run(
            [*ssh, f"source ~/.bashrc; {command}"], check=False, capture_output=True, text=True, timeout=120
        )
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    """Three machines with nothing on them but packages, and a user who has followed docs/deploying.md."""
    folder = tmp_path_factory.mktemp("site")
    home = folder / "user"
    with machines(folder, ["head", "first", "second"]) as hosts:
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh" / "id").write_bytes((folder / "id").read_bytes())
        (home / ".ssh" / "id").chmod(0o600)
        (home / ".specserve").mkdir()
        (home / ".specserve" / "api_key").write_text(f"{API_KEY}\n")
        text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
        for old, new in (CHANGES | {"~/.ssh/id_ed25519": str(home / ".ssh" / "id")}).items():
            assert old in text
            text = text.replace(old, new)
        (home / "cluster.yaml").write_text(text, encoding="utf-8")
        found = Site(home / "cluster.yaml", home, hosts)
        found.ray("get-auth-token", "--generate")
        yield found


@pytest.fixture(scope="module")
def up(site) -> Iterator[Site]:
    """`ray up`, all three nodes in the cluster; `ray down` whatever happens."""
    try:
        site.ray("up", "--yes", str(site.cluster))
        yield site
    finally:
        site.ray("down", "--yes", str(site.cluster))


@pytest.fixture(scope="module")
def url(up) -> str:
    """The endpoint after `serve deploy`."""
    up.ray("exec", str(up.cluster), "serve deploy ~/specserve/deploy/serve.yaml")
    address = f"http://{up.hosts[0].address}:8000"
    wait_for("the endpoint", lambda: ready(address), 900, lambda: up.shell(up.hosts[0], "ray status; serve status"))
    return address


def ready(url: str) -> bool:
    try:
        return get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


def get(url: str, **more: Any) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.get(url, **more)


def wait_for(what: str, ready: Callable[[], bool], patience_s: float, told: Callable[[], str] = str) -> None:
    deadline_s = time.monotonic() + patience_s
    while not ready():
        assert time.monotonic() < deadline_s, f"no sign of {what} for {patience_s:g} s\n{told()}"
        time.sleep(1)


def running(host: Host, title: str) -> list[int]:
    return [pid for pid, line in host.processes().items() if line.startswith(title)]


def chat(url: str, key: str = API_KEY) -> httpx.Response:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    with httpx.Client(trust_env=False, timeout=120) as client:
        return client.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def test_a_chat_is_answered_with_drafts(url):
    """Over HTTP, from outside the machines, with tokens that the draft guessed."""
    answer = chat(url)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["usage"]["completion_tokens"] == 24
    assert len(found["choices"][0]["message"]["content"]) > 20
    assert found["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_draft_and_verifier_run_on_different_hosts(url, up):
    """The kernel says so: each process lives in the network of the host that the cluster file meant for it."""
    _, target_host, draft_host = up.hosts
    for title, host in (("ray::VerifierActor", target_host), ("ray::DraftActor", draft_host)):
        (pid,) = running(host, title)
        assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{host.init}/ns/net")
        assert [other.name for other in up.hosts if running(other, title)] == [host.name]


def test_the_way_between_hosts_was_measured(url, up):
    """At least one worker is on another host than the coordinator; the log of the pipeline says how far away."""
    search = "grep -rhoE '(draft|target) worker: [0-9.]+ ms to the coordinator' /tmp/ray/session_latest/logs/"
    assert "ms to the coordinator" in "".join(up.shell(host, search) for host in up.hosts)


def test_the_endpoint_asks_for_the_key(url):
    """The key that was copied to the machines is in force; metrics are open, as the Serve file says."""
    assert chat(url, "another-key").status_code == 401
    assert get(f"{url}/v1/models").status_code == 401
    assert "specserve_generation_tokens_total" in get(f"{url}/metrics").text


def test_ray_asks_for_the_token(up):
    """With the token the cluster answers; with another nobody gets in."""
    address = f"{up.hosts[0].address}:6379"
    up.ray("health-check", "--address", address)
    with pytest.raises(AssertionError, match=r"(?i)unauthenticated|invalid.*token|authentication"):
        up.ray("health-check", "--address", address, RAY_AUTH_TOKEN="not-the-token-of-this-cluster-at-all")


def test_what_takes_deployments_is_not_reached_from_outside(up):
    """The dashboard listens on the head's loopback address only."""
    assert "8265" in up.shell(up.hosts[0], "cat /proc/net/tcp | grep -o 0100007F:2049 && echo 8265")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((up.hosts[0].address, 8265), timeout=5)


def test_every_node_exports_ray_metrics(up):
    """On port 8080, as the cluster file says."""
    for host in up.hosts:
        wait_for(f"metrics of {host.name}", lambda: "ray_node_" in metrics_of(host), 60)  # noqa: B023


def metrics_of(host: Host) -> str:
    try:
        return get(f"http://{host.address}:8080/metrics").text
    except httpx.HTTPError:
        return ""


def test_nodes_are_of_the_kinds_that_the_cluster_file_says(url, up):
    """One target node, one draft node, and a head that is neither."""
    said = up.shell(up.hosts[0], f"python -c '{NODES}'")
    nodes = dict(json.loads(said.strip().splitlines()[-1]))
    kinds = {address: [name for name in found if name.endswith("_node")] for address, found in nodes.items()}
    assert kinds == {"10.77.0.1": [], "10.77.0.2": ["target_node"], "10.77.0.3": ["draft_node"]}


def test_ray_down_leaves_nothing(url, up):
    """Half a minute later no process is on any machine but its ssh server."""
    assert all(host.leftovers() for host in up.hosts)
    up.ray("down", "--yes", str(up.cluster))
    wait_for("an empty cluster", lambda: not any(host.leftovers() for host in up.hosts), 120, lambda: left(up.hosts))


def left(hosts: list[Host]) -> str:
    return "\n".join(f"{host.name}: {line[:150]}" for host in hosts for line in host.leftovers())
