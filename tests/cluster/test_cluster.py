"""A whole deployment on a local Ray: HTTP in front, three processes behind, and what happens when they are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from cluster_facts import PROMPT, TOKENS

from specserve.config import Config
from specserve.errors import ConfigError

pytestmark = pytest.mark.ray

WAIT_S = 60.0


@pytest.fixture(scope="module")
def url(config, ray_here) -> Iterator[str]:
    """The deployment with the socket transport."""
    with served(config) as address:
        yield address


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


def test_chat_over_http(url):
    """A chat request is answered, with usage and at the asked length."""
    message = {"role": "user", "content": "Hello"}
    asked = {"model": "tiny", "messages": [message], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=WAIT_S).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12


def test_the_parts_are_different_processes(url):
    """Supervisor, coordinator, target and draft run in four processes, none of them this one."""
    found = pids()
    assert found.keys() == {"pipeline", "coordinator", "target", "draft"}
    assert len({os.getpid(), *found.values()}) == 5


def test_text_is_that_of_the_local_engine(url, expected_text):
    """Over sockets the greedy answer is that of one process, and drafts were used and kept."""
    answer = complete(url)
    assert answer["choices"][0]["text"] == expected_text
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > TOKENS / 2


def test_structured_answers_across_processes(url):
    """The specification reaches both workers over the wire; a wrong one is refused by the ingress alone."""
    asked = body(structured_outputs={"regex": "(yes|no){3}!"}, ignore_eos=False)
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=WAIT_S).json()
    assert re.fullmatch("(yes|no){3}!", answer["choices"][0]["text"])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert drafted(answer) > 0
    refused = httpx.post(f"{url}/v1/completions", json=body(structured_outputs={"regex": "(a"}), timeout=WAIT_S)
    assert refused.status_code == 400
    both = httpx.post(f"{url}/v1/completions", json=asked | {"ignore_eos": True}, timeout=WAIT_S)
    assert (both.status_code, both.json()["error"]["code"]) == (400, "invalid_value")


def test_many_at_once(url, expected_text):
    """Sixteen concurrent streams end with the same answer each."""
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(stream(url, lambda: None)[0])) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected_text] * 16


def test_killed_draft_worker_changes_nothing(url, expected_text):
    """SIGKILL of the draft worker in mid stream: same text; then drafts come again from a new process."""
    assert kill_mid_stream(url, "draft") == expected_text
    answer = complete(url)
    assert answer["choices"][0]["text"] == expected_text
    assert drafted(answer) > 0


def test_killed_verifier_is_replaced_under_the_stream(url, expected_text):
    """SIGKILL of the verifier in mid stream: the stream waits and ends with the same text."""
    assert kill_mid_stream(url, "target") == expected_text


def test_killed_coordinator_is_replaced_under_the_stream(url, expected_text):
    """SIGKILL of the coordinator in mid stream: the stream waits and ends with the same text; later ones are served."""
    assert kill_mid_stream(url, "coordinator") == expected_text
    assert complete(url)["choices"][0]["text"] == expected_text


def test_metrics_over_http(url):
    """The coordinator's counters are behind /metrics."""
    text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
    assert "specserve_round_seconds_count" in text


def test_a_taken_port_is_refused_before_anything_starts(config):
    """A port in use is a ConfigError that names it."""
    from specserve.cluster.launch import serve_until_stopped

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = config.server.model_copy(update={"port": port})
        with pytest.raises(ConfigError, match=str(port)):
            serve_until_stopped(config.model_copy(update={"server": server}))
