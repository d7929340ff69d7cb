"""A server in steady state: requests that all decode, looked at through its own counters between two instants.

Tokens, rounds and busy times are counted by the coordinator in one go per round, with the round's wall time, so rates
need no clock on this side, and neither the start nor the end of answers is in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields

import httpx
from prometheus_client.parser import text_string_to_metric_families

from specserve.errors import SpecserveError

_POLL_S = 0.1
_WARM_UP_S = 0.7
_SETTLE_S = 60.0

_SUMS = {
    "tokens": ("generation_tokens_total", ""),
    "kept": ("spec_decode_num_accepted_tokens_total", ""),
    "drafts": ("spec_decode_num_drafts_total", ""),
    "drafted": ("spec_decode_num_draft_tokens_total", ""),
    "refused": ("spec_decode_emitted_tokens_total", "correction"),
    "wall_s": ("round_seconds_sum", ""),
    "draft_s": ("worker_busy_seconds_total", "draft/draft"),
    "target_s": ("worker_busy_seconds_total", "target/forward target/sampling"),
    "overlap_s": ("overlap_seconds_total", ""),
    "hits": ("spec_decode_outcomes_total", "hit"),
    "misses": ("spec_decode_outcomes_total", "miss"),
    "rounds": ("round_seconds_count", ""),
    "wire_s": ("worker_wait_seconds_total", "draft/wire target/wire"),
    "bytes": ("network_bytes_total", ""),
    "draft_steps": ("emulated_steps_total", "draft/in_time draft/late draft/refused"),
    "draft_late": ("emulated_steps_total", "draft/late"),
    "draft_refused": ("emulated_steps_total", "draft/refused"),
    "target_steps": ("emulated_steps_total", "target/in_time target/late target/refused"),
    "target_late": ("emulated_steps_total", "target/late"),
    "target_refused": ("emulated_steps_total", "target/refused"),
}
"""Where each field of `Counters` is found: a metric, and which values of the labels that tell its parts apart."""

_WORKER_LINKS = ("to_target", "from_target", "to_draft", "from_draft")
_PARTS = ("role", "kind", "phase", "position", "result", "reason")


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums since a server started; times are seconds. drafts counts chains that were offered, drafted their tokens; of
    these, kept and refused were decided, and the target did not get to those behind a refused one.

    hits and misses count rows for which outcomes had been drafted ahead; wire_s is that of both workers' messages, and
    bytes are those of all messages but a request's own way in and out. Steps are those of emulated devices, late those
    of them that were told late, refused those that were not told.
    """

    tokens: float
    kept: float
    drafts: float
    drafted: float
    refused: float
    wall_s: float
    draft_s: float
    target_s: float
    overlap_s: float = 0.0
    hits: float = 0.0
    misses: float = 0.0
    rounds: float = 0.0
    wire_s: float = 0.0
    bytes: float = 0.0
    draft_steps: float = 0.0
    draft_late: float = 0.0
    draft_refused: float = 0.0
    target_steps: float = 0.0
    target_late: float = 0.0
    target_refused: float = 0.0

    @staticmethod
    def of(exposition: str) -> Counters:
        """Read the sums out of a Prometheus text."""
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                part = "/".join(sample.labels[key] for key in _PARTS if key in sample.labels)
                place = sample.name.removeprefix("specserve_"), part
                if "link" in sample.labels:
                    place = place[0], "" if sample.labels["link"] in _WORKER_LINKS else sample.labels["link"]
                found[place] = found.get(place, 0.0) + sample.value
        return Counters(**{name: _sum_of(found, *place) for name, place in _SUMS.items()})

    def since(self, before: Counters) -> Counters:
        """What was added."""
        return Counters(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))

    @staticmethod
    def sum(windows: Sequence[Counters]) -> Counters:
        """What several windows added, all together."""
        return Counters(*(sum(getattr(window, each.name) for window in windows) for each in fields(Counters)))

    @property
    def steps(self) -> float:
        """Rows' shares of rounds: each of them gave one token that the target chose itself."""
        return self.tokens - self.kept


def _sum_of(found: Mapping[tuple[str, str], float], metric: str, parts: str) -> float:
    """The metric's parts together; one without parts has a part without a name."""
    return sum(found.get((metric, part), 0.0) for part in parts.split() or [""])


@dataclass(frozen=True, slots=True)
class Ask:
    """One kind of load: `rows` requests at once. depth 0 is plain decoding; loads of different `texts` share none."""

    rows: int
    temperature: float
    depth: int
    texts: int = 0

    @property
    def numbers(self) -> range:
        """Those of its requests' texts."""
        return range(self.texts * self.rows, (self.texts + 1) * self.rows)


def prompt(number: int) -> list[int]:
    """The beginning of a text, by number: what follows from it has nothing to do with what follows from another."""
    return [1, 2 + number % 256, 2 + number // 256, *range(258, 282)]


class Server:
    """A running server and how it is asked. longest is the most tokens that an answer may have."""

    def __init__(self, base_url: str, model: str, longest: int) -> None:
        self._base_url = base_url
        self._model = model
        self._longest = longest

    def measure(self, ask: Ask, window_s: float) -> Counters:
        """What `window_s` seconds of this load added to the counters. Raises SpecserveError when a request fails."""
        return asyncio.run(self._measure(ask, window_s))

    async def _measure(self, ask: Ask, window_s: float) -> Counters:
        limits = httpx.Limits(max_connections=ask.rows + 1)
        async with httpx.AsyncClient(base_url=self._base_url, timeout=600, limits=limits) as client:
            async with _tasks([self._answer(client, ask, number) for number in ask.numbers]) as answers:
                await _until_running(client, ask.rows, answers)
                await _pause(answers, _WARM_UP_S)
                before = await _counters(client)
                await _pause(answers, window_s)
                after = await _counters(client)
            await _until_running(client, 0, [])
        return after.since(before)

    async def _answer(self, client: httpx.AsyncClient, ask: Ask, number: int) -> None:
        """Ask for more tokens than there is time for. Always raises."""
        body = {
            "model": self._model,
            "prompt": prompt(number),
            "max_tokens": self._longest,
            "temperature": ask.temperature,
            "seed": number,
            "ignore_eos": True,
            "speculation": {"enabled": True, "depth": ask.depth} if ask.depth else {"enabled": False},
        }
        reply = await client.post("/v1/completions", json=body)
        if reply.status_code != 200:
            raise SpecserveError(f"the server answered {reply.status_code}: {reply.text[:300]}")
        raise SpecserveError(
            f"an answer of {self._longest} tokens ended before it was measured; use a shorter --window"
        )


async def _counters(client: httpx.AsyncClient) -> Counters:
    return Counters.of((await client.get("/metrics")).text)


async def _until_running(client: httpx.AsyncClient, rows: int, answers: Sequence[asyncio.Task[None]]) -> None:
    """Wait until exactly `rows` requests take part in rounds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _SETTLE_S
    while await _running_now(client) != rows:
        if loop.time() > deadline:
            raise SpecserveError(f"{rows} requests do not run together after {_SETTLE_S:g} s")
        await _pause(answers, _POLL_S)


async def _running_now(client: httpx.AsyncClient) -> int:
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return int(sum(s.value for f in families if f.name == "specserve_num_requests_running" for s in f.samples))


@asynccontextmanager
async def _tasks(coroutines: Sequence[Coroutine[None, None, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Tasks that are cancelled at the end; the server sees its clients go."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pause(answers: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Sleep, unless an answer ends meanwhile: then raise what it ended with."""
    if not answers:
        await asyncio.sleep(seconds)
        return
    done, _ = await asyncio.wait(answers, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
