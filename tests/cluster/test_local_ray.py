"""The folders of local Rays: those of dead launchers are removed, all others are not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from specserve.cluster import local_ray, processes
from specserve.errors import ConfigError


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folders_of_dead_launchers_are_removed(temporary):
    """A folder whose owner process is gone is removed; those of live owners and without an owner file stay."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    mine = Path(local_ray._own_folder())
    orphan, foreign, unknown = (temporary / f"sps-{name}" for name in ("orphan", "foreign", "unknown"))
    for folder in (orphan, foreign, unknown):
        folder.mkdir()
    namespace = os.readlink("/proc/self/ns/pid")
    (orphan / "owner").write_text(f"{child.pid} 1 {namespace}")
    (foreign / "owner").write_text(f"{child.pid} 1 pid:[1]")
    local_ray.remove_orphans()
    assert sorted(temporary.iterdir()) == sorted([mine, foreign, unknown])


def test_without_proc_nothing_is_removed(temporary, monkeypatch):
    """Where nobody can tell whether a process lives, every folder stays."""
    (temporary / "sps-a").mkdir()
    (temporary / "sps-a" / "owner").write_text("1 1 pid:[1]")
    monkeypatch.setattr(processes, "current", lambda: None)
    local_ray.remove_orphans()
    assert (temporary / "sps-a").is_dir()


AT_IMPORT = """
import os, sys

class Watching:
    @staticmethod
    def find_spec(name, *_):
        if name == "ray":
            print(os.environ.get("RAY_raylet_start_wait_time_s"))

sys.meta_path.insert(0, Watching)
import specserve.cluster
print(os.environ.get("RAY_raylet_start_wait_time_s"))
"""
"""What Ray finds in the environment when it is first imported, and what is left there."""


@pytest.mark.parametrize(("given", "found"), [({}, ["90", "None"]), ({"RAY_raylet_start_wait_time_s": "7"}, ["7"] * 2)])
def test_ray_gives_its_node_more_time_to_start_unless_told_otherwise(given, found):
    """Ray reads this when it is imported, and never again; nothing of it is left to other programs."""
    without = {name: value for name, value in os.environ.items() if name != "RAY_raylet_start_wait_time_s"}
    said = subprocess.run([sys.executable, "-c", AT_IMPORT], env=without | given, capture_output=True, check=True)
    assert said.stdout.decode().split() == found


@pytest.mark.parametrize(("given", "found"), [(None, "90"), ("7", "7")])
def test_ray_gives_its_first_process_more_time_to_start_unless_told_otherwise(given, found, monkeypatch):
    """This is read when it starts."""
    name = "RAY_gcs_server_port_wait_time_s"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    with local_ray._environment(local_ray._variables("/nowhere")):
        assert os.environ[name] == found
    assert os.environ.get(name) == given


@pytest.mark.parametrize("port", [0, 18437])
@pytest.mark.parametrize("host", ["256.1.1.1", "nowhere.invalid", "192.0.2.1", "x" * 70 + ".y", "::2"])
def test_a_host_that_is_not_here_is_refused_in_words(host: str, port: int) -> None:
    """Whether or not a port is named: a ConfigError that names the setting, never what the socket raised."""
    with pytest.raises(ConfigError, match=r"server\.host"):
        local_ray.check_port(host, port) if port else local_ray.free_port(host)


def test_a_port_that_is_taken_is_the_port_s_fault() -> None:
    """The message names the port, and a free one is found beside it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.port {port}"):
            local_ray.check_port("127.0.0.1", port)
        assert local_ray.free_port("127.0.0.1") != port


def test_of_two_servers_that_begin_at_once_one_is_refused_and_a_restart_is_not() -> None:
    """A claim is there before anybody listens; it ends with its holder, and says nothing of other ports."""
    port = local_ray.free_port("127.0.0.1")
    with local_ray.claimed("127.0.0.1", port):
        for refused in (local_ray.check_port, lambda host, port: local_ray.claimed(host, port).__enter__()):
            with pytest.raises(ConfigError, match=f"another server begins on port {port}"):
                refused("127.0.0.1", port)
        local_ray.check_port("127.0.0.1", local_ray.free_port("127.0.0.1"))
    local_ray.check_port("127.0.0.1", port)
