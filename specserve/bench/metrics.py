"""`specserve bench metrics`: what it costs to be watched, with metrics on and off and with every request traced.

Two measurements. *Throughput*: whole engines in this process answer the same prompts in turn, one pass each after the
other in an order that rotates; a pass is compared with the same round's pass without metrics, and the median of these
ratios is reported, so that what else the machine does meanwhile falls on all alike. *Coordinator*: processor time of
the coordinator for a round, by `bench coordinator`'s drive, engines taking turns round by round.

Off means that nothing is counted: no series, no history, no round in numbers. What stays is the account of who computes
when (`coordinator/activity.py`), which the timeline is read off. With metrics on, each pass is scraped once.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from specserve.bench.compare import chat_prompts
from specserve.bench.coordinator import MODES, Drive
from specserve.bench.coordinator import Options as DriveOptions
from specserve.bench.report import Row
from specserve.config import Config, TracingConfig
from specserve.errors import ConfigError
from specserve.local import LocalEngine, load_parts
from specserve.metrics import EngineMetrics
from specserve.metrics.engine import Committed
from specserve.tracing import tracer_of
from specserve.types import CacheStats, PoolLevels, Request, RequestId, RequestStats, Role, Sampling

Progress = Callable[[str], None]
T = TypeVar("T")

OFF, ON, TRACED = "off", "metrics", "metrics and traces"
_WARM_UP = 30


@dataclass(frozen=True, slots=True)
class Options:
    """Passes of `prompts` requests at once with `max_tokens` each; rounds of the coordinator with `batch` requests."""

    passes: int = 15
    prompts: int = 8
    max_tokens: int = 32
    batch: tuple[int, ...] = (1, 16, 64)
    rounds: int = 400

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if min(self.passes, self.prompts, self.max_tokens, *self.batch) < 1 or self.rounds < 2:
            raise ConfigError("--passes, --prompts, --max-tokens and --batch take numbers from 1, --rounds from 2")


class Uncounted(EngineMetrics):
    """Takes everything that happens in a round or to a request, and does nothing."""

    def committed(self, verdicts: Committed) -> None:
        """Nothing."""

    def levels(self, levels: PoolLevels) -> None:
        """Nothing."""

    def prefix_cache(self, role: Role, stats: CacheStats) -> None:
        """Nothing."""

    def ended(self, reason: str, stats: RequestStats) -> None:
        """Nothing."""

    def dropped(self, reason: str, count: int = 1) -> None:
        """Nothing."""

    def wasted(self, reason: str, tokens: int) -> None:
        """Nothing."""

    def computed(self, role: Role, phases: object, wire_s: float) -> None:
        """Nothing."""

    def waited(self, role: Role, reason: str, seconds: float) -> None:
        """Nothing."""

    def overlapped(self, seconds: float) -> None:
        """Nothing."""


def measure(config: Config, options: Options, progress: Progress) -> tuple[list[Row], list[Row]]:
    """Rows of throughput, and rows of the coordinator's own time. Raises ConfigError."""
    options.check()
    with tempfile.TemporaryDirectory() as folder:
        tracing = TracingConfig(exporter="file", path=str(Path(folder) / "spans.jsonl"))
        progress("throughput")
        throughput = _throughput(config, options, tracing)
        coordinator = []
        for batch in options.batch:
            progress(f"coordinator, {batch} requests")
            coordinator += _coordinator(batch, options, tracing)
    return throughput, coordinator


# ---- throughput


def _throughput(config: Config, options: Options, tracing: TracingConfig) -> list[Row]:
    plain = _with_tracing(config, TracingConfig())
    settings = {OFF: plain, ON: plain, TRACED: _with_tracing(config, tracing)}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(_engine(each, counted=name != OFF)) for name, each in settings.items()}
        for engine in engines.values():
            _answer(engine, options, False)  # what is done once
        passes = []
        for number in range(options.passes):
            names = rotated(list(engines), number)
            passes.append({name: _answer(engines[name], options, name == TRACED) for name in names})
    return [
        {
            "system": name,
            "tokens_per_s": median(each[name] for each in passes),
            "against_off": median(each[name] / each[OFF] for each in passes),
            "lowest": min(each[name] / each[OFF] for each in passes),
            "highest": max(each[name] / each[OFF] for each in passes),
        }
        for name in engines
    ]


def _with_tracing(config: Config, tracing: TracingConfig) -> Config:
    return config.model_copy(update={"observe": config.observe.model_copy(update={"tracing": tracing})})


@contextmanager
def _engine(config: Config, *, counted: bool) -> Iterator[LocalEngine]:
    metrics = None if counted else Uncounted(config.served_name, config.engine.depth)
    with LocalEngine(config, parts=load_parts(config), metrics=metrics) as engine:
        yield engine


def _answer(engine: LocalEngine, options: Options, traced: bool) -> float:
    """Tokens per second of one pass, with a scrape at its end."""
    requests = [
        Request(
            RequestId(f"bench-{number}"),
            tuple(prompt),
            options.max_tokens,
            Sampling(temperature=0),
            ignore_eos=True,
            trace=f"00-{number + 1:032x}-{number + 1:016x}-01" if traced else None,
        )
        for number, prompt in enumerate(chat_prompts(engine.tokenizer, options.prompts))
    ]
    began_s = time.perf_counter()
    answers = engine.complete(requests)
    engine.metrics_text()
    return sum(len(each.tokens) for each in answers) / (time.perf_counter() - began_s)


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items from another one on, so that none is always first."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


# ---- coordinator


def _coordinator(batch: int, options: Options, tracing: TracingConfig) -> list[Row]:
    mode, drive = MODES["ahead1"], DriveOptions(rounds=options.rounds)
    tracer = tracer_of(tracing, "bench")
    assert tracer is not None
    drives = {
        OFF: Drive(mode, 0.0, batch, drive, metrics=Uncounted("bench")),
        ON: Drive(mode, 0.0, batch, drive),
        TRACED: Drive(mode, 0.0, batch, drive, tracer=tracer),
    }
    for _ in range(_WARM_UP):
        for each in drives.values():
            each.round()
    gc.collect()
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in drives}
    for number in range(options.rounds):
        for name in rotated(list(drives), number):
            costs[name].append(drives[name].round())
    tracer.close()
    base_ms = _medians(costs[OFF])[0]
    return [_coordinator_row(name, batch, base_ms, *_medians(costs[name])) for name in drives]


def _coordinator_row(name: str, batch: int, base_ms: float, total_ms: float, critical_ms: float) -> Row:
    return {
        "system": name,
        "batch": batch,
        "round_ms": total_ms,
        "more_ms": total_ms - base_ms,
        "critical_ms": critical_ms,
    }


def _medians(costs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Milliseconds of a round, in all and on the critical path."""
    return 1000 * median(total for total, _ in costs), 1000 * median(critical for _, critical in costs)
