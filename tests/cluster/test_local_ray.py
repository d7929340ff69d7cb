"""The folders of local Rays: those of dead launchers are removed, all others are not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from specserve.cluster import local_ray, processes


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
