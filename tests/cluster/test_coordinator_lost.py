"""SIGKILL of the coordinator under open streams of every kind: none fails, and each says what it promised."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from cluster_facts import PROMPT, TOKENS
from scraped import Scrape
from test_cluster import WAIT_S, body, healthy, pids, served, until

pytestmark = pytest.mark.ray

SEEDED = {"temperature": 1.0, "seed": 7}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 2, "echo": True},
    "coupled": SEEDED | {"speculation": {"rule": "coupled"}},
    "rejection": SEEDED | {"speculation": {"rule": "rejection"}},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "two": {"n": 2},
    "stop": {"min_tokens": 3},
    "prediction": {"prediction": {"type": "content", "content": "a text that is not the answer"}},
    "structured": {"structured_outputs": {"regex": "(yes|no|maybe){60}!"}, "ignore_eos": False},
    "short": {"max_tokens": 200},
}
"""Ten kinds, each asked for twice; the stop text of `stop` is a piece of the greedy answer."""


@pytest.fixture(scope="module")
def url(config, ray_here):
    """Room for twenty long answers."""
    target = config.target.model_copy(update={"kv_blocks": 1200})
    draft = config.draft.model_copy(update={"model": config.draft.model.model_copy(update={"kv_blocks": 1200})})
    with served(config.model_copy(update={"target": target, "draft": draft})) as address:
        yield address


@dataclass
class Answer:
    """What a client got of one stream."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    scored: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)
    done: int = 0
    began: threading.Event = field(default_factory=threading.Event)

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done += 1
        elif line.startswith("data: "):
            self.chunk(json.loads(line.removeprefix("data: ")))

    def chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.errors.append(chunk["error"])
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["logprobs"]:
                self.scored += len(choice["logprobs"]["tokens"])
            if choice["finish_reason"]:
                self.reasons[index] = choice["finish_reason"]
            self.began.set()


def ask(url: str, fields: dict[str, Any], answer: Answer) -> None:
    asked = body(stream=True, stream_options={"include_usage": True}) | fields
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=WAIT_S) as response:
            if response.status_code != 200:
                answer.errors.append(response.read())
            for line in response.iter_lines():
                answer.take(line)
    except httpx.HTTPError as error:
        answer.errors.append(error)
    finally:
        answer.began.set()


def streams(url: str, asked: list[dict[str, Any]], killing: bool) -> list[Answer]:
    """The answers to these requests, all at once; with a coordinator that dies when all of them have begun."""
    answers = [Answer() for _ in asked]
    threads = [threading.Thread(target=ask, args=(url, *each)) for each in zip(asked, answers, strict=True)]
    pid = pids()["coordinator"]
    for thread in threads:
        thread.start()
    if killing:
        for answer in answers:
            answer.began.wait(WAIT_S)
        assert sum(not answer.reasons for answer in answers) >= len(answers) / 2, "too late to kill"
        os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    if killing:
        until(lambda: pids()["coordinator"] != pid and healthy(url))
    return answers


def test_twenty_open_streams_survive_their_coordinator(url, expected_text):
    """Greedy and coupled answers are the same; others are whole; usage, scores and reasons are those of one piece."""
    kinds = KINDS | {"stop": KINDS["stop"] | {"stop": [expected_text[-60:-40], "nothing like it"]}}
    calm = dict(zip(kinds, streams(url, list(kinds.values()), killing=False), strict=True))
    weights = {role: pids()[role] for role in ("draft", "target")}
    lost = streams(url, [*kinds.values(), *kinds.values()], killing=True)
    for kind, answer in zip([*kinds, *kinds], lost, strict=True):
        expected = calm[kind]
        assert not answer.errors, (kind, answer.errors)
        assert answer.done == 1, kind
        assert answer.usage["prompt_tokens"] == expected.usage["prompt_tokens"], kind
        if kind == "rejection":
            assert answer.usage["completion_tokens"] == TOKENS
            continue
        assert answer.texts == expected.texts, kind
        assert answer.reasons == expected.reasons, kind
        assert answer.scored == expected.scored, kind
        assert answer.usage["completion_tokens"] == expected.usage["completion_tokens"], kind
    assert calm["logprobs"].scored == len(PROMPT) + TOKENS
    assert re.fullmatch("(yes|no|maybe){60}!", calm["structured"].texts[0])
    assert calm["stop"].reasons == {0: "stop"}
    assert expected_text.startswith(calm["stop"].texts[0])
    assert {role: pids()[role] for role in weights} == weights  # they kept their weights
    until(lambda: idle(url))
    found = Scrape(httpx.get(f"{url}/metrics", timeout=WAIT_S).text)
    assert found.sum("specserve_requests_resumed_total") >= 10


def idle(url: str) -> bool:
    """Nothing is held: no request, no slot, no block."""
    found = Scrape(httpx.get(f"{url}/metrics", timeout=WAIT_S).text)
    held = found.sum("specserve_kv_blocks", state="held") + found.sum("specserve_num_requests_running")
    return held + found.sum("specserve_slots") - found.sum("specserve_slots", state="free") == 0


def test_a_request_that_comes_while_there_is_no_coordinator_waits(url, expected_text):
    """It is answered when there is one again, instead of being refused."""
    pid = pids()["coordinator"]
    os.kill(pid, signal.SIGKILL)
    answer = Answer()
    ask(url, {}, answer)
    assert not answer.errors
    assert answer.texts == {0: expected_text}
    until(lambda: pids()["coordinator"] != pid and healthy(url))


def test_a_stream_survives_one_coordinator_after_another(url, expected_text):
    """The second one dies when it has just gone on."""
    answer = Answer()
    thread = threading.Thread(target=ask, args=(url, {}, answer))
    thread.start()
    for _ in range(2):
        pid = pids()["coordinator"]
        answer.began.wait(WAIT_S)
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: pids()["coordinator"] != pid)
    thread.join()
    assert not answer.errors
    assert answer.texts == {0: expected_text}
