"""A deployment on the local Ray of the tests, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from cluster_facts import PROMPT, TOKENS

from specserve.config import Config

WAIT_S = 60.0


class served:
    """Deploy, yield the address, take down."""

    def __init__(self, config: Config) -> None:
        from specserve.cluster.launch import deployed, with_port

        self.config = with_port(config)
        self.deployment = deployed(self.config, threading.Event())

    def __enter__(self) -> str:
        assert self.deployment.__enter__()
        return f"http://127.0.0.1:{self.config.server.port}"

    def __exit__(self, *error: object) -> None:
        self.deployment.__exit__(*error)  # type: ignore[arg-type]


def body(**more: object) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | more


def complete(url: str) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=body(), timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def drafted(answer: dict[str, Any]) -> int:
    return answer["metrics"]["speculative_decoding"]["num_draft_tokens"]


def stream(url: str, after_first: Callable[[], None]) -> tuple[str, int]:
    """The text of a streamed answer and the number of chunks that came after the call."""
    pieces: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body(stream=True), timeout=WAIT_S) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            pieces.append(chunk["choices"][0]["text"])
            if len(pieces) == 1:
                after_first()
    return "".join(pieces), len(pieces) - 1


def pids() -> dict[str, int]:
    from specserve.cluster.launch import pipeline_states

    (state,) = pipeline_states()
    return state.pids


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.2)


def healthy(url: str) -> bool:
    answer = httpx.get(f"{url}/health", timeout=WAIT_S)
    return answer.json()["status"] == "ok"


def kill_mid_stream(url: str, role: str) -> str:
    """Kill a worker after the first chunk; the text, once the worker is back as another process."""
    pid = pids()[role]
    text, later = stream(url, lambda: os.kill(pid, signal.SIGKILL))
    assert later > 1
    until(lambda: pids()[role] != pid and healthy(url))
    return text
