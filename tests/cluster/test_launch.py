"""`serve_until_stopped` as a process of its own: it starts, serves, and leaves nothing when it is told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from specserve.app import build
from specserve.cluster.processes import descendants
from specserve.config import Config
from specserve.errors import ConfigError

_SERVE = """
import sys
from specserve import config as configs
from specserve.cluster.launch import serve_until_stopped
serve_until_stopped(configs.Config.model_validate_json(sys.argv[1]))
"""


@pytest.mark.ray
@pytest.mark.full
def test_sigterm_ends_everything(config: Config, tmp_path: Path):
    """After SIGTERM the exit is 0; no process and no file of the deployment is left; the banner was all it printed."""
    before = descendants()
    # Paths of unix sockets are short, so the temporary folder cannot be the test's own.
    command = [sys.executable, "-c", _SERVE, config.model_dump_json()]
    with (tmp_path / "err").open("w") as err, subprocess.Popen(command, stdout=-1, stderr=err, text=True) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(3)]
        url = lines[2].split()[1].removesuffix("/chat/completions")
        assert httpx.get(f"{url}/models", timeout=30).json()["data"][0]["id"] == "tiny"
        started = descendants() - before
        server.send_signal(signal.SIGTERM)
        rest = server.stdout.read()
        assert server.wait(60) == 0
    assert rest == ""
    assert len(started) > 5
    assert not any(process.alive() for process in started)
    assert os.getpid() not in {process.pid for process in started}


def test_builder_refuses_unknown_keys():
    """The application builder names a wrong key instead of ignoring it."""
    with pytest.raises(ConfigError, match="engin"):
        build({"engin": {}})


def test_builder_makes_an_application():
    """The builder needs no running Ray and binds pipeline and ingress."""
    assert type(build({})).__name__ == "Application"
