"""`specserve bench scale`: one deployment of several pipelines, on emulated devices and a Ray of its own.

throughput  closed loop on 1, 2, 4, … pipelines: tokens/s, and the share of a core that each kind of process takes
routing     prompts of several long shared beginnings: what each way of routing finds, and the time to the first token
model       from what was measured: HTTP processes that 1,000 pipelines need (`scale_model`)
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from specserve import config as configs
from specserve.bench.byte_client import ByteClient
from specserve.bench.load import Answer, Call, asked, closed_loop, process_s, quantile
from specserve.bench.prompts import CHATS
from specserve.bench.report import Row
from specserve.bench.scale_model import Sample, fitted, needed
from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models import _device_profile

Progress = Callable[[str], None]

ROUTING = ("prefix", "least_loaded", "round_robin")
SIDES = {"proxy": "ProxyActor", "ingress": "Ingress", "coordinator": "CoordinatorActor", "pipeline": "Pipeline"}
"""Kinds of process by a word in their titles."""

_KV_BLOCKS = 16384
_IDLE_S = 4.0
_SETTLE_S = 1.0
_TAIL_TOKENS = 16
_FIRST_ID = 10


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. clients is for each pipeline; prefixes and prefix_tokens describe the shared beginnings."""

    profile: str = "qwen3-32b-0.6b-h100"
    pipelines: tuple[int, ...] = (1, 2, 4)
    clients: int = 16
    seconds: float = 10.0
    max_tokens: int = 128
    routing: tuple[str, ...] = ROUTING
    routing_pipelines: int = 2
    prefixes: int = 8
    prefix_tokens: int = 1024

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if unknown := sorted(set(self.routing) - set(ROUTING)):
            raise ConfigError(f"no routing called {', '.join(unknown)}; there are: {', '.join(ROUTING)}")
        if any(count < 1 for count in (*self.pipelines, self.clients, self.routing_pipelines, self.prefixes)):
            raise ConfigError("--pipelines, --clients, --routing-pipelines and --prefixes take numbers from 1")
        if self.seconds <= 0 or self.max_tokens < 2 or self.prefix_tokens < 1:
            raise ConfigError("--seconds must be above 0, --max-tokens at least 2, --prefix-tokens at least 1")


@dataclass(frozen=True, slots=True)
class Results:
    """The rows of each part."""

    throughput: list[Row]
    routing: list[Row]
    model: list[Row]


def measure(options: Options, progress: Progress) -> Results:
    """Run all parts. Raises ConfigError."""
    options.check()
    samples: list[Sample] = []
    throughput: list[Row] = []
    for count in options.pipelines:
        progress(f"{count} pipeline{'s' if count > 1 else ''}")
        row, sample = _throughput(options, count)
        throughput.append(row)
        samples.append(sample)
    routing = [_routed(options, policy, progress) for policy in options.routing]
    return Results(throughput, routing, needed(fitted(samples)) if samples else [])


def configured(options: Options, pipelines: int, routing: str = "prefix") -> Config:
    """The configuration of a server for these options. Raises ConfigError."""
    settings = _device_profile.settings(options.profile) | {
        "server.port": 0,
        "server.max_inflight": 4096,
        # As much KV as these prompts can fill; what the devices could hold takes this machine's memory.
        "target.kv_blocks": _KV_BLOCKS,
        "draft.model.kv_blocks": _KV_BLOCKS,
        "cluster.pipelines": pipelines,
        "cluster.routing": routing,
        "engine.max_requests": max(64, options.clients),
    }
    return configs.parse(configs.override({}, settings), where="bench scale")


@contextmanager
def _served(config: Config) -> Iterator[tuple[str, Config]]:
    from specserve.cluster.launch import running

    with running(config) as (url, final):
        time.sleep(_SETTLE_S)
        yield url, final


# ---- throughput -----------------------------------------------------------------------------------------------------


def _throughput(options: Options, pipelines: int) -> tuple[Row, Sample]:
    with _served(configured(options, pipelines)) as (url, _):
        idle = _shares(lambda: time.sleep(_IDLE_S))[1]
        clients = pipelines * options.clients
        calls: list[Call] = []
        seconds, busy = _shares(lambda: calls.extend(asyncio.run(_chats(url, clients, options))))
    answered = [call for call in calls if call.first_s is not None]
    events, tokens = sum(call.events for call in answered), sum(call.tokens for call in answered)
    first = quantile((call.first_s for call in answered if call.first_s is not None), 0.5)
    row: Row = {
        "pipelines": pipelines,
        "clients": clients,
        "failed": len(calls) - len(answered),
        "tok_s": tokens / seconds,
        "tok_s_pipeline": tokens / seconds / pipelines,
        "ttft_p50_ms": None if first is None else 1000 * first,
        "tok_event": tokens / events if events else None,
        **{f"{side}_core": share for side, share in busy.items()},
        **{f"{side}_idle": share for side, share in idle.items()},
    }
    return row, Sample(pipelines, events / seconds, idle, busy)


def _shares(work: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Seconds that some work took, and the share of one core that each kind of process took, per process."""
    before, began_s = process_s(SIDES.values()), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - began_s, process_s(SIDES.values())
    return seconds, {
        side: (after[title][0] - before[title][0]) / seconds / max(1, after[title][1]) for side, title in SIDES.items()
    }


async def _chats(url: str, clients: int, options: Options) -> list[Call]:
    prompts = random.Random(1)

    async def ask(client: ByteClient) -> Answer:
        messages = [{"role": "user", "content": prompts.choice(CHATS)}]
        return await asked(client, "chat/completions", {"messages": messages, "max_tokens": options.max_tokens})

    return await _closed(url, ask, clients, options.seconds)


async def _closed(url: str, ask: Callable[[ByteClient], Awaitable[Answer]], clients: int, seconds: float) -> list[Call]:
    async with ByteClient(url) as client:
        answers = await closed_loop(lambda: ask(client), clients, seconds)
    return [answer.call() for answer in answers]


# ---- routing --------------------------------------------------------------------------------------------------------


def _routed(options: Options, policy: str, progress: Progress) -> Row:
    progress(f"routing {policy}, {options.routing_pipelines} pipelines")
    with _served(configured(options, options.routing_pipelines, policy)) as (url, _):
        clients = options.routing_pipelines * options.clients
        calls = asyncio.run(_shared_beginnings(url, clients, options))
        found = httpx.get(f"{url}/status.json", timeout=60).json()["routing"]
    return routing_row(policy, calls, found)


def routing_row(policy: str, calls: list[Call], found: dict[str, int]) -> Row:
    """What the calls came to: affinity as the router counts it, hits as the pipelines report them.

    matched_share: prompt blocks that their pipeline was sent before. cached_share: prompt tokens that the pipelines had
    cached; 0 where they have no prefix cache.
    """
    first = [call.first_s for call in calls if call.first_s is not None]
    prompt, cached = sum(call.prompt for call in calls), sum(call.cached for call in calls)
    half, most = quantile(first, 0.5), quantile(first, 0.99)
    return {
        "routing": policy,
        "requests": len(calls),
        "failed": len(calls) - len(first),
        "matched_share": found["matched_blocks"] / found["blocks"] if found["blocks"] else None,
        "cached_share": cached / prompt if prompt else None,
        "ttft_p50_ms": None if half is None else 1000 * half,
        "ttft_p99_ms": None if most is None else 1000 * most,
    }


async def _shared_beginnings(url: str, clients: int, options: Options) -> list[Call]:
    chance = random.Random(2)
    ids = range(_FIRST_ID, _FIRST_ID + 200)
    beginnings = [chance.choices(ids, k=options.prefix_tokens) for _ in range(options.prefixes)]

    async def ask(client: ByteClient) -> Answer:
        prompt = chance.choice(beginnings) + chance.choices(ids, k=_TAIL_TOKENS)
        return await asked(client, "completions", {"prompt": prompt, "max_tokens": options.max_tokens})

    return await _closed(url, ask, clients, options.seconds)
