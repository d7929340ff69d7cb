"""Streams that are watched: whether each ended once, with the text that it must have, and when it got what."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import httpx

from specserve.bench.prompts import CHATS
from specserve.errors import SpecserveError

End = Literal["finished", "failed", "cut", "hung"]
"""failed: told so, in an error event or by an HTTP status; cut: the connection broke; hung: nothing came any more."""

_PATIENCE_S: Final = 180.0
_PROMPTS: Final = 8
_PAUSE_S: Final = 0.05
_TRIES: Final = 5
_BETWEEN_TRIES_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request whose text is determined: greedy, or with a seed under a rule that keeps its promise to a seed."""

    body: dict[str, Any]

    @staticmethod
    def all_of(model: str, max_tokens: int) -> list[Ask]:
        """Eight prompts, each greedy and each drawn with a seed."""
        drawn = {"temperature": 0.8, "speculation": {"rule": "coupled"}}
        common = {"model": model, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        return [
            Ask(common | {"prompt": prompt, "seed": seed} | options)
            for seed, prompt in enumerate(CHATS[:_PROMPTS])
            for options in ({"temperature": 0}, drawn)
        ]


@dataclass(slots=True)
class Seen:
    """One stream. Times are seconds of the monotonic clock; `at` holds when events came."""

    began_s: float
    at: list[float] = field(default_factory=list)
    text: str = ""
    finishes: int = 0
    errors: int = 0
    end: End = "cut"
    ended_s: float = 0.0
    reason: str = ""

    @property
    def ends(self) -> int:
        """How many times it was said to be over: 1, or 0 where the connection broke first."""
        return self.finishes + self.errors

    def wrong(self, expected: str) -> bool:
        """It ended twice, a finished one has another text, or what came of another is not how the text begins."""
        if self.ends > 1 or not expected.startswith(self.text):
            return True
        return self.end == "finished" and self.text != expected

    def longest_gap_s(self, from_s: float, to_s: float) -> float:
        """The longest time between two events of which some part lies between these two times, 0 if there is none."""
        pairs = itertools.pairwise(self.at)
        return max((after - before for before, after in pairs if after > from_s and before < to_s), default=0.0)


async def watch(client: httpx.AsyncClient, ask: Ask) -> Seen:
    """Send a request and follow its stream to the end, whatever that is."""
    seen = Seen(time.monotonic())
    try:
        async with asyncio.timeout(_PATIENCE_S), client.stream("POST", "/v1/completions", json=ask.body) as reply:
            if reply.status_code == 200:
                await _follow(reply, seen)
            else:
                seen.errors, seen.end = 1, "failed"
                seen.reason = f"{reply.status_code} {(await reply.aread()).decode(errors='replace')[:200]}"
    except TimeoutError:
        seen.end = "hung"
    except httpx.HTTPError as error:
        seen.end, seen.reason = "cut", f"{type(error).__name__}: {error}"
    seen.ended_s = time.monotonic()
    return seen


async def _follow(reply: httpx.Response, seen: Seen) -> None:
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            _take(json.loads(line.removeprefix("data: ")), seen)
    if seen.ends:
        seen.end = "failed" if seen.errors else "finished"


def _take(event: dict[str, Any], seen: Seen) -> None:
    seen.at.append(time.monotonic())
    if "error" in event:
        seen.errors += 1
        seen.reason = str(event["error"].get("message"))
        return
    for choice in event["choices"]:
        seen.text += choice["text"]
        seen.finishes += choice["finish_reason"] is not None


async def expectations(client: httpx.AsyncClient, asks: Sequence[Ask]) -> list[str]:
    """The texts of a server to which nothing happens. Raises SpecserveError when it does not answer."""
    return list(await asyncio.gather(*(_expected(client, ask) for ask in asks)))


async def _expected(client: httpx.AsyncClient, ask: Ask) -> str:
    for _ in range(_TRIES):
        seen = await watch(client, ask)
        if seen.end == "finished":
            return seen.text
        await asyncio.sleep(_BETWEEN_TRIES_S)  # a machine that is busy with starting takes processes for lost
    raise SpecserveError(f"the server does not answer before any fault: {seen.end} {seen.reason}")


async def keep_asking(
    client: httpx.AsyncClient,
    asks: Sequence[Ask],
    clients: int,
    until: Awaitable[None],
    note: Callable[[int, Seen], None],
) -> None:
    """So many clients, each of which asks again when it is answered, until `until` is over; all ends are noted."""
    turns, over = itertools.count(), asyncio.ensure_future(until)

    async def one() -> None:
        while not over.done():
            number = next(turns) % len(asks)
            seen = await watch(client, asks[number])
            note(number, seen)
            if seen.end != "finished":
                await asyncio.sleep(_PAUSE_S)  # who is refused does not ask again at once

    await asyncio.gather(over, *(one() for _ in range(clients)))
