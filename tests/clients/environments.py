"""Environments of their own for programs that are pointed at the server: made once, kept under the cache folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from specserve.cache import key_of, root

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"

_INSTALL_S = 1200


def python_with(name: str, requirements: Sequence[str], *, before: Sequence[str] = ()) -> Path:
    """The interpreter of an environment with these packages; skips the test where a registry lacks them.

    `before` are installed first, in the versions that the project itself is tested with.
    """

    def build(folder: Path) -> None:
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if before:
            _run([*pip, "-c", str(CONSTRAINTS), *before])
        _run([*pip, *requirements])

    return _made(name, [*before, *requirements], build) / "bin" / "python"


def node_with(name: str, packages: Sequence[str]) -> Path:
    """A folder whose node_modules hold these packages; skips the test without Node or where a registry lacks them."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("there is no Node here")

    def build(folder: Path) -> None:
        folder.mkdir()
        (folder / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
        _run(["npm", "install", "--silent", "--prefix", str(folder), *packages])

    return _made(name, packages, build)


def run(command: Sequence[str | Path], *, timeout_s: float, **variables: str) -> str:
    """What a program prints; fails the test with its last words when it fails. It inherits no PYTHONPATH of ours."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"} | variables
    environment = {key: value for key, value in environment.items() if value}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def result(command: Sequence[str | Path], *, timeout_s: float, **variables: str) -> Any:
    """The JSON in the last line that a program prints."""
    return json.loads(run(command, timeout_s=timeout_s, **variables).splitlines()[-1])


def _made(name: str, parts: Sequence[str], build: Callable[[Path], None]) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = root() / "test-environments" / f"{name}-{key_of(version, *parts)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    ready = folder.with_suffix(".ready")
    with FileLock(folder.with_suffix(".lock"), timeout=_INSTALL_S):
        if not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                build(folder)
            except _NotInstalled as error:
                shutil.rmtree(folder, ignore_errors=True)
                pytest.skip(f"cannot install {', '.join(parts)}: {error}")
            ready.touch()
    return folder


class _NotInstalled(Exception):
    pass


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise _NotInstalled(f"took longer than {_INSTALL_S} s") from None
    if done.returncode:
        raise _NotInstalled((done.stderr.strip().splitlines() or ["no reason given"])[-1])
