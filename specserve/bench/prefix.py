"""`specserve bench prefix`: what the prefix cache saves until the first token, and what prompts cost running answers.

Warm against cold: prompts of made-up token ids that begin alike, one at a time; each beginning is read once cold and
once warm. Stalls: one answer runs, a long new prompt arrives, and the longest gap between two of the answer's rounds
until the prompt has its first token is what the prompt cost it, for several values of `engine.prefill_budget`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from specserve.bench.report import Row
from specserve.config import Config, override, parse
from specserve.errors import ConfigError
from specserve.local import LocalEngine, Parts, load_parts
from specserve.types import Request, RequestId, Sampling

Progress = Callable[[str], None]

_TAIL = 8
"""Tokens that differ behind a shared beginning."""

_SETTLED = 8
"""Rounds of the running answer before the prompt arrives; their gaps are what the longest one is compared with."""


@dataclass(frozen=True, slots=True)
class Options:
    """prefix is how many tokens are shared, repeats how many beginnings are read; budgets are those to try."""

    prefix: int = 1000
    repeats: int = 5
    budgets: tuple[int, ...] = (32, 128, 512)

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if self.prefix < 1 or self.repeats < 1 or min(self.budgets, default=1) < 1:
            raise ConfigError("--prefix, --repeats and --budgets take numbers from 1")


def measure(config: Config, options: Options, progress: Progress) -> list[Row]:
    """One row for cold and one for warm beginnings, one for each budget. Raises ConfigError."""
    options.check()
    parts = load_parts(config, progress)
    room = parts.target.context_length
    if options.prefix + _TAIL >= room:
        raise ConfigError(f"--prefix {options.prefix} and {_TAIL} more tokens do not fit into a context of {room}")
    return [*_beginnings(config, parts, options, progress), *_stalls(config, parts, options, progress)]


def _beginnings(config: Config, parts: Parts, options: Options, progress: Progress) -> Iterator[Row]:
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    cached: dict[str, int] = {}
    with LocalEngine(config, parts=parts) as engine:
        texts = _Texts(parts.target.vocab_size)
        engine.complete([_request("before", texts.take(options.prefix), 1)])  # first use of the kernels
        for repeat in range(options.repeats):
            progress(f"beginning {repeat + 1} of {options.repeats}")
            beginning = texts.take(options.prefix)
            for name, seconds in times.items():
                request = _request(f"{name}-{repeat}", (*beginning, *texts.take(_TAIL)), 1)
                stats = engine.complete([request])[0].stats
                seconds.append(stats.first_token_s)
                cached[name] = stats.cached_tokens
    for name, seconds in times.items():
        yield _row(
            name,
            prompt_tokens=options.prefix + _TAIL,
            cached_tokens=cached[name],
            first_token_ms=1000 * median(seconds),
            times_faster=median(times["cold"]) / median(seconds),
        )


def _stalls(config: Config, parts: Parts, options: Options, progress: Progress) -> Iterator[Row]:
    texts = _Texts(parts.target.vocab_size)
    for budget in options.budgets:
        progress(f"prefill budget {budget}")
        settings = {"engine.prefill_budget": budget, "engine.prefill_chunk": budget}
        settings["engine.max_batch_tokens"] = max(config.engine.max_batch_tokens, budget + config.engine.max_requests)
        budgeted = parse(override(config.model_dump(), settings))
        with LocalEngine(budgeted, parts=parts) as engine:
            before_s, longest_s, first_s = asyncio.run(_stall(engine, texts, options.prefix))
        yield _row(
            f"beside an answer, budget {budget}",
            prompt_tokens=options.prefix,
            cached_tokens=0,
            first_token_ms=1000 * first_s,
            usual_gap_ms=1000 * before_s,
            longest_gap_ms=1000 * longest_s,
        )


async def _stall(engine: LocalEngine, texts: _Texts, length: int) -> tuple[float, float, float]:
    """Seconds: the answer's usual gap, its longest one beside the prompt, and the prompt's until its first token."""
    came: list[float] = []
    settled = asyncio.Event()

    async def run() -> None:
        async for _ in engine.stream(_request("running", texts.take(_TAIL), engine.card.context_length)):
            came.append(time.monotonic())
            if len(came) == _SETTLED:
                settled.set()

    running = asyncio.create_task(run())
    await asyncio.wait([running, waiting := asyncio.create_task(settled.wait())], return_when="FIRST_COMPLETED")
    waiting.cancel()
    begin = time.monotonic()
    async for _ in engine.stream(_request("prompt", texts.take(length), 1)):
        pass
    first_s = time.monotonic() - begin
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    gaps = [(later, later - earlier) for earlier, later in pairwise(came)]
    usual = median(gap for at, gap in gaps if at < begin)
    return usual, max((gap for at, gap in gaps if at >= begin), default=first_s), first_s


class _Texts:
    """Token ids without meaning; no two texts begin alike."""

    def __init__(self, vocab_size: int) -> None:
        self._chance = random.Random(0)
        self._vocab_size = vocab_size

    def take(self, length: int) -> tuple[int, ...]:
        """The next text of so many tokens."""
        return tuple(self._chance.randrange(self._vocab_size) for _ in range(length))


def _request(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(RequestId(name), prompt, max_tokens, Sampling(temperature=0), ignore_eos=True)


def _row(case: str, **figures: float | None) -> Row:
    names = ("prompt_tokens", "cached_tokens", "first_token_ms", "times_faster", "usual_gap_ms", "longest_gap_ms")
    return {"case": case} | {name: figures.get(name) for name in names}
