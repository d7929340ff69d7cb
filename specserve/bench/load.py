"""`specserve bench load`: what clients see under load, and what the HTTP side itself costs.

Closed loop: so many clients, each of which asks again as soon as it is answered, or, where it was refused for lack of
room (429, 503), when it was told to come back. Open loop: requests come at a rate,
whether or not earlier ones are answered (exponential gaps, fixed seed). Prompts ship with the project, answers end
where the model ends them. The server is given by its address, or is one of emulated devices on a Ray of its own; then
the processor time of its HTTP side is counted too: Serve's proxy, the ingress, and the coordinator.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import httpx

from specserve import config as configs
from specserve.bench.byte_client import ByteClient, Heard
from specserve.bench.prompts import CHATS
from specserve.bench.report import Row
from specserve.errors import ConfigError, Unavailable
from specserve.models import _device_profile

Progress = Callable[[str], None]

_HTTP_SIDE: Final = ("ProxyActor", "Ingress", "CoordinatorActor")
_STREAMS, _TOKENS_PER_S = 64, 30
"""The load of which the last column tells the share of one core."""

_PATIENCE_S: Final = 600.0


class Asked(Protocol):
    """What a loop needs to know of an answer."""

    @property
    def retry_s(self) -> float | None:
        """When to come back, where there was no room."""
        ...


A = TypeVar("A", bound=Asked)


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. An answer is good when its first token and its time per token are within these times."""

    url: str | None = None
    profile: str = "qwen3-32b-0.6b-h100"
    clients: tuple[int, ...] = (1, 8, 64)
    rates: tuple[float, ...] = (4.0,)
    seconds: float = 10.0
    max_tokens: int = 128
    queue: int = 256
    good_first_s: float = 0.5
    good_token_s: float = 0.05

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if any(count < 1 for count in self.clients) or any(rate <= 0 for rate in self.rates):
            raise ConfigError("--clients takes numbers from 1, --rates numbers above 0")
        if not self.clients and not self.rates:
            raise ConfigError("there is nothing to measure; give --clients or --rates")
        if self.seconds <= 0 or self.max_tokens < 2 or self.queue < 0:
            raise ConfigError("--seconds must be above 0, --max-tokens at least 2, and --queue at least 0")


@dataclass(frozen=True, slots=True)
class Call:
    """One request as its client saw it; times are seconds. first_s is None where it was not answered: see failure.

    prompt are its tokens, of which the server says that it had cached so many. retry_s is given where it had no room.
    """

    first_s: float | None
    token_s: float | None = None
    tokens: int = 0
    events: int = 0
    prompt: int = 0
    cached: int = 0
    failure: str = ""
    retry_s: float | None = None


def measure(options: Options, progress: Progress) -> list[Row]:
    """A row for each load. Raises ConfigError, and Unavailable where there is no server."""
    options.check()
    rows: list[Row] = []
    with _server(options) as (url, own):
        _check_there(url)
        for kind, size in [*(("closed", n) for n in options.clients), *(("open", rate) for rate in options.rates)]:
            progress(f"{kind} loop, {size:g} {'clients' if kind == 'closed' else 'requests/s'}")
            before = http_side_s() if own else 0.0
            began = time.perf_counter()
            calls = asyncio.run(_loaded(url, kind, size, options))
            seconds = time.perf_counter() - began
            used_s = http_side_s() - before if own else None
            rows.append(row_of(kind, size, calls, seconds, used_s, options))
            for failure, count in Counter(call.failure for call in calls if call.failure).items():
                progress(f"{count} failed: {failure}")
    return rows


def row_of(kind: str, size: float, calls: list[Call], seconds: float, used_s: float | None, options: Options) -> Row:
    """What the calls of one load come to. used_s is the processor time of the HTTP side.

    refused are those for which there was no room, ttft is the time to the first text, tpot the mean time for each token
    after it, good_s good answers a second, us_event processor time per streamed event, core_64x30 the share of a core
    for 64 streams of 30 tokens/s.
    """
    answered = [call for call in calls if call.first_s is not None]
    first = [call.first_s for call in answered if call.first_s is not None]
    each = [call.token_s for call in answered if call.token_s is not None]
    good = sum(_is_good(call, options) for call in answered)
    tokens, events = sum(call.tokens for call in answered), sum(call.events for call in answered)
    return {
        "loop": kind,
        "load": size,
        "requests": len(calls),
        "refused": sum(call.retry_s is not None for call in calls),
        "failed": sum(call.first_s is None and call.retry_s is None for call in calls),
        "tok_s": tokens / seconds,
        "ttft_p50_ms": _ms(quantile(first, 0.5)),
        "ttft_p99_ms": _ms(quantile(first, 0.99)),
        "tpot_ms": _ms(sum(each) / len(each) if each else None),
        "tpot_p99_ms": _ms(quantile(each, 0.99)),
        "good_s": good / seconds,
        "tok_event": tokens / events if events else None,
        "us_event": 1e6 * used_s / events if used_s is not None and events else None,
        "core_64x30": used_s / tokens * _STREAMS * _TOKENS_PER_S if used_s is not None and tokens else None,
    }


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _is_good(call: Call, options: Options) -> bool:
    in_time = call.first_s is not None and call.first_s <= options.good_first_s
    return in_time and (call.token_s is None or call.token_s <= options.good_token_s)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _check_there(url: str) -> None:
    try:
        httpx.get(f"{url}/health", timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"no answer from {url} ({error}); is there a server?") from None


@contextmanager
def _server(options: Options) -> Iterator[tuple[str, bool]]:
    """The address, and whether the server is a child of this process."""
    if options.url is not None:
        yield options.url.rstrip("/").removesuffix("/v1"), False
        return
    from specserve.cluster.launch import running

    settings = _device_profile.settings(options.profile) | {"server.port": 0, "engine.max_requests": _STREAMS}
    settings |= {"engine.queue_limit": options.queue}
    with running(configs.parse(configs.override({}, settings))) as (url, _):
        yield url, True


async def _loaded(url: str, kind: str, size: float, options: Options) -> list[Call]:
    prompts = random.Random(1)
    async with ByteClient(url) as client:

        async def ask() -> Answer:
            messages = [{"role": "user", "content": prompts.choice(CHATS)}]
            return await asked(client, "chat/completions", {"messages": messages, "max_tokens": options.max_tokens})

        if kind == "closed":
            answers = await closed_loop(ask, int(size), options.seconds)
        else:
            answers = await open_loop(ask, size, options.seconds, random.Random(0))
    return [answer.call() for answer in answers]


async def closed_loop(ask: Callable[[], Awaitable[A]], clients: int, seconds: float) -> list[A]:
    """Each client asks again when it is answered or may come back, while there is time; what runs is waited for."""
    end_s = time.perf_counter() + seconds
    answers: list[A] = []

    async def client() -> None:
        while time.perf_counter() < end_s:
            answers.append(answer := await ask())
            await asyncio.sleep(min(answer.retry_s or 0.0, max(0.0, end_s - time.perf_counter())))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def open_loop(ask: Callable[[], Awaitable[A]], rate: float, seconds: float, chance: random.Random) -> list[A]:
    """Requests come with exponential gaps, `rate` a second on average; all are waited for."""
    began_s = time.perf_counter()
    due_s, tasks = 0.0, []
    while (due_s := due_s + chance.expovariate(rate)) < seconds:
        await asyncio.sleep(began_s + due_s - time.perf_counter())
        tasks.append(asyncio.ensure_future(ask()))
    return list(await asyncio.gather(*tasks))


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request, as bytes: a load reads them when it is over. heard is None where nobody answered."""

    began_s: float
    heard: Heard | None
    failure: str = ""

    @property
    def retry_s(self) -> float | None:
        """When to come back, where there was no room."""
        if self.heard is None or self.heard.status not in (429, 503):
            return None
        exact, told = self.heard.header("retry-after-ms"), self.heard.header("retry-after")
        if exact.isdecimal():
            return int(exact) / 1000
        return float(told) if told.isdecimal() else 1.0

    def call(self) -> Call:
        """The same as its client saw it."""
        if self.heard is None:
            return Call(None, failure=self.failure)
        if self.retry_s is not None:
            return Call(None, retry_s=self.retry_s)
        if self.heard.status != 200:
            return Call(None, failure=f"{self.heard.status} {_message(self.heard.body)}")
        return _read(self.began_s, self.heard)


async def asked(client: ByteClient, path: str, body: dict[str, Any]) -> Answer:
    """Stream the answer to this body from a path below /v1."""
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return Answer(began_s, await client.post(f"/v1/{path}", data))
    except (TimeoutError, Unavailable) as error:
        return Answer(began_s, None, repr(error))


def _read(began_s: float, heard: Heard) -> Call:
    times: list[float] = []
    usage: dict[str, Any] = {}
    ended_s = None
    for when, line in heard.lines():
        if line == b"data: [DONE]":
            ended_s = when - began_s
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return Call(None, failure=_message(line[6:]))
        if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event["choices"]):
            times.append(when)
        usage = event.get("usage") or usage
    if ended_s is None:
        return Call(None, failure="the stream broke off")
    tokens, prompt = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if not times:  # an answer may have no text at all: its end is then the first that a client sees
        return Call(ended_s, None, tokens, 0, prompt, cached)
    per_token = (times[-1] - times[0]) / (tokens - 1) if tokens > 1 else None
    return Call(times[0] - began_s, per_token, tokens, len(times), prompt, cached)


def _message(body: bytes) -> str:
    """What an error body says; the body itself where it has another form."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def http_side_s() -> float:
    """Processor seconds so far of the proxy, ingress and coordinator that descend from this process."""
    return sum(seconds for seconds, _ in process_s(_HTTP_SIDE).values())


def process_s(names: Iterable[str]) -> dict[str, tuple[float, int]]:
    """By name: processor seconds so far, and number, of the processes below this one with the name in their title."""
    parents, used, titles = {}, {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                title = (folder / "cmdline").read_text()
            except OSError:  # it ended meanwhile
                continue
            pid = int(folder.name)
            parents[pid], used[pid], titles[pid] = int(fields[1]), int(fields[11]) + int(fields[12]), title
    below = [pid for pid in titles if _descends(pid, parents)]
    found = {name: [used[pid] for pid in below if name in titles[pid]] for name in names}
    return {name: (sum(ticks) / os.sysconf("SC_CLK_TCK"), len(ticks)) for name, ticks in found.items()}


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


def plot(rows: list[Row], path: Path) -> None:
    """Draw first-token and per-token times (99th percentiles, median of the first) by load. Raises ConfigError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib, or the extra specserve[dev]") from None
    figure = Figure(figsize=(9, 4), layout="constrained")
    for panel, (loop, unit) in zip(figure.subplots(1, 2), (("closed", "clients"), ("open", "requests/s")), strict=True):
        _draw(panel, [row for row in rows if row["loop"] == loop], unit)
        panel.set_title(f"{loop} loop")
    figure.savefig(path)


def _draw(panel: Any, rows: list[Row], unit: str) -> None:
    loads = [row["load"] for row in rows]
    for name, label in (
        ("ttft_p50_ms", "first token, median"),
        ("ttft_p99_ms", "first token, p99"),
        ("tpot_p99_ms", "per token, p99"),
    ):
        panel.plot(loads, [row[name] for row in rows], "o-", label=label)
    panel.set(xlabel=unit, ylabel="ms", yscale="log")
    if rows:
        panel.legend()
