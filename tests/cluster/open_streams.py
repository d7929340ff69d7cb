"""Open streams of every kind, and a coordinator that dies under them."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
from deployment import WAIT_S, body, healthy, pids, until
from scraped import Scrape

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
"""Ten kinds; the stop text of `stop` is a piece of the greedy answer."""


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


def idle(url: str) -> bool:
    """Nothing is held: no request, no slot, no block."""
    found = Scrape(httpx.get(f"{url}/metrics", timeout=WAIT_S).text)
    held = found.sum("specserve_kv_blocks", state="held") + found.sum("specserve_num_requests_running")
    return held + found.sum("specserve_slots") - found.sum("specserve_slots", state="free") == 0
