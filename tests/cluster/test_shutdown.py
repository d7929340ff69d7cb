"""SIGTERM under load: what runs may end, what comes is told 503, and then nothing is left of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pytest
from cluster_facts import PROMPT, TOKENS
from test_launch import _SERVE

from specserve.cluster.processes import descendants

pytestmark = [pytest.mark.ray, pytest.mark.full]

SHARED = Path("/dev/shm")


class Stream(threading.Thread):
    """A stream that is followed to its end, at a client's own pace."""

    def __init__(self, url: str, pause_s: float) -> None:
        super().__init__()
        self.url, self.pause_s = url, pause_s
        self.begun = threading.Event()
        self.text = ""
        self.lines: list[str] = []

    def run(self) -> None:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", f"{self.url}/completions", json=body | {"stream": True}, timeout=60) as reply:
            for line in reply.iter_lines():
                self.lines += [line] if line else []
                if line.startswith("data: {"):
                    self.text += "".join(each["text"] for each in json.loads(line[6:]).get("choices", []))
                    self.begun.set()
                    time.sleep(self.pause_s)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.full)])
def test_sigterm_lets_streams_end_refuses_new_ones_and_leaves_nothing(config, expected_text, tmp_path, number):
    """The open stream gets all of its text, a new request a 503, and the exit is 0; also where the terminal is closed.

    No process, no file in shared memory and no temporary folder is left.
    """
    shared, folders = set(SHARED.rglob("*")), set(Path(tempfile.gettempdir()).glob("sps-*"))
    before = descendants()
    slow = config.model_copy(update={"engine": config.engine.model_copy(update={"depth": 0})})
    command = [sys.executable, "-c", _SERVE, slow.model_dump_json()]
    with (tmp_path / "err").open("w") as err, subprocess.Popen(command, stdout=-1, stderr=err, text=True) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(3)]
        url = lines[2].split()[1].removesuffix("/chat/completions")
        stream = Stream(url, pause_s=0.0)
        stream.start()
        assert stream.begun.wait(60)
        started = descendants() - before
        server.send_signal(number)
        refused = refusal(url)
        stream.join(60)
        assert server.wait(60) == 0
    assert refused is None or refused.status_code == 503
    assert stream.text == expected_text or "error" in stream.lines[-1]
    assert len(started) > 5
    assert not any(process.alive() for process in started)
    assert set(SHARED.rglob("*")) <= shared
    assert set(Path(tempfile.gettempdir()).glob("sps-*")) <= folders


def refusal(url: str) -> httpx.Response | None:
    """The first answer that is not 200 to requests that come while it drains; None when nobody listens any more."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        try:
            reply = httpx.post(f"{url}/completions", json=body, timeout=30)
        except httpx.TransportError:
            return None
        if reply.status_code != 200:
            return reply
    raise AssertionError("requests were taken for half a minute after SIGTERM")
