"""`specserve bench coordinator`: what the coordinator itself costs in a round, by the number of running requests.

An engine runs between workers that answer at once with made-up results, so that nothing but the engine is measured:
processor time of its thread inside `receive`, `advance` and `flush`, the garbage collector's share included. Packing
and sending are not in it, nor is what workers compute. Beside it stands the critical part, from a verdict's arrival to
the next round's departure: the target idles meanwhile.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median, quantiles
from typing import Any

import numpy as np
import tokenizers

from specserve.bench.report import Row
from specserve.config import parse
from specserve.coordinator.engine import Engine
from specserve.errors import ConfigError
from specserve.long_lived import leave_alone
from specserve.metrics import EngineMetrics
from specserve.text import Tokenizer
from specserve.tracing import Tracer
from specserve.transport import Arrived
from specserve.transport.messages import Dists, Message, Plan, PlanAhead, Push, PushAhead, Verdict, Verify
from specserve.types import Request, RequestId, Sampling, WorkerInfo

Progress = Callable[[str], None]

_VOCAB = 1000
_BLOCK_TOKENS = 16
_WARM_UP = 30
"""Rounds before those that count, beyond the prompts' own."""

_DRAWN = 7
"""What every drafted token is; guesses of a next token are one of those from here on, by rank."""

_TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"
"""The traceparent of every request, where there is a tracer."""

_ROUND_S = 0.1
_STEP_S = 0.001
"""What the workers say they needed, so that every branch may be as deep as it likes."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How far ahead is drafted, and what a round may cost: limit_ms plus limit_us for each request."""

    depth: int
    outcomes: int
    limit_us: float
    limit_ms: float = 0.5


MODES = {
    "plain": Mode(0, 0, 20),
    "serial": Mode(4, 0, 20),
    "ahead1": Mode(4, 1, 20),
    "ahead12": Mode(5, 12, 50),
}
"""By name; the last one has 12 branches of 5 tokens to offer for each request."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run: every combination. Each runs `rounds` rounds from `context` tokens on."""

    modes: tuple[str, ...] = tuple(MODES)
    temperature: tuple[float, ...] = (0.0, 1.0)
    batch: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 500
    rounds: int = 100

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown:
            raise ConfigError(f"no mode called {unknown[0]!r}; there are: {', '.join(MODES)}")
        if min(*self.batch, self.context, 1) < 1 or self.rounds < 2:
            raise ConfigError("--batch and --context take numbers from 1, --rounds from 2")


def measure(options: Options, progress: Progress) -> list[Row]:
    """One row for each mode, temperature and batch, with the straight line through the batches. Raises ConfigError."""
    options.check()
    leave_alone()  # as a process that serves does with what it imported
    return [
        row
        for mode, temperature in product(options.modes, options.temperature)
        for row in _growth(mode, temperature, options, progress)
    ]


def _growth(name: str, temperature: float, options: Options, progress: Progress) -> list[Row]:
    mode, costs = MODES[name], []
    for batch in options.batch:
        progress(f"{name}, temperature {temperature:g}, {batch} requests")
        costs.append(_cost(mode, temperature, batch, options))
    fixed_ms, per_request_us = _line(options.batch, [median(total) for total, _ in costs])
    return [
        {
            "mode": name,
            "temperature": temperature,
            "batch": batch,
            "median_ms": median(total),
            "p90_ms": quantiles(total, n=10)[-1],
            "critical_ms": median(critical),
            "limit_ms": mode.limit_ms + mode.limit_us * batch / 1000,
            "fixed_ms": fixed_ms,
            "per_request_us": per_request_us,
        }
        for batch, (total, critical) in zip(options.batch, costs, strict=True)
    ]


def _line(batch: Sequence[int], medians_ms: Sequence[float]) -> tuple[float | None, float | None]:
    """A round's own cost in ms and that of one more request in µs: least squares of the relative errors."""
    if len(set(batch)) < 2:
        return None, None
    costs = np.array(medians_ms)
    columns = np.stack([np.ones(len(batch)), np.array(batch)], axis=1) / costs[:, None]
    fixed, slope = np.linalg.lstsq(columns, np.ones(len(batch)), rcond=None)[0].tolist()
    return fixed, slope * 1000


def _cost(mode: Mode, temperature: float, batch: int, options: Options) -> tuple[list[float], list[float]]:
    """Milliseconds of each round, in all and on the critical path."""
    drive = Drive(mode, temperature, batch, options)
    for _ in range(_WARM_UP):
        drive.round()
    gc.collect()
    costs = [drive.round() for _ in range(options.rounds)]
    return [total * 1000 for total, _ in costs], [critical * 1000 for _, critical in costs]


class Drive:
    """An engine with running requests, driven round by round."""

    def __init__(
        self,
        mode: Mode,
        temperature: float,
        batch: int,
        options: Options,
        metrics: EngineMetrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """metrics and tracer are told of all that happens; by default the metrics of a server are."""
        self._metrics = EngineMetrics("bench", max_depth=mode.depth) if metrics is None else metrics
        self._tracer = tracer
        answer = (options.rounds + _WARM_UP + 2) * (mode.depth + 1)
        self._now_s = 0.0
        self._spent_s = 0.0  # in this round, all in all
        self._path_s = 0.0  # of it, what the next round waited for
        self._critical_s = 0.0
        self._began_s = 0.0
        self._sampled = temperature > 0
        self._replies: deque[Message] = deque()
        self._sent: list[Verify] = []  # the round in flight, if there is one
        self._asked: list[Message] = []  # plans that wait for their answers
        self._draws = np.random.default_rng(batch)
        self._engine = self._engine_of(mode, batch, options.context + answer + 64)
        for number in range(batch):
            prompt = tuple(np.random.default_rng(number).integers(_VOCAB, size=options.context).tolist())
            request = Request(RequestId(str(number)), prompt, answer, Sampling(temperature))
            self._engine.submit(request if tracer is None else replace(request, trace=_TRACE), "client")
        while not any(int(verify.due.sum()) == batch for verify in self._sent):
            self.round()

    def _engine_of(self, mode: Mode, batch: int, context: int) -> Engine:
        blocks = batch * (context // _BLOCK_TOKENS + 2 + 2 * mode.outcomes)
        settings = {
            "depth": mode.depth,
            "depth_policy": "fixed",  # what workers say that they needed is made up
            "outcomes": mode.outcomes,
            "max_requests": batch,
            "max_batch_tokens": batch * context,  # every prompt is read in the first round
            "prefill_chunk": context,
            "queue_limit": batch,
            "block_tokens": _BLOCK_TOKENS,
        }
        return Engine(
            parse({"engine": settings}),
            target=WorkerInfo("target", "cpu", blocks, _BLOCK_TOKENS, context, _VOCAB, 0, 0.0),
            draft=WorkerInfo("draft", "cpu", blocks, _BLOCK_TOKENS, context, _VOCAB, 0, 0.0) if mode.depth else None,
            verifier=_Wire(self._take_verify),
            drafter=_Wire(self._asked.append) if mode.depth else None,
            guesser=None,
            tokenizer=Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel()), end_tokens=frozenset()),
            metrics=self._metrics,
            sink=lambda owner, deltas: None,
            clock=lambda: self._now_s,
            tracer=self._tracer,
        )

    def round(self) -> tuple[float, float]:
        """Seconds of the engine's own for one round, in all and until the next one was sent."""
        self._spent_s = self._path_s = 0.0
        self._now_s += _ROUND_S
        self._replies.extend(_verdict(verify, self._draws) for verify in self._sent)
        self._sent.clear()
        while self._replies or not self._sent:
            self._turn()
        return self._spent_s, self._critical_s

    def _turn(self) -> None:
        """What the coordinator's loop does for one message."""
        if self._replies:
            message = self._replies.popleft()
            self._path_s += self._timed(self._engine.receive, Arrived(_sender(message), 0, message))
        self._path_s += self._timed(self._engine.advance)
        self._timed(self._engine.flush)
        for message in self._asked:
            self._replies.extend(_answers(message, self._sampled))
        self._asked.clear()

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> float:
        self._began_s = time.thread_time()
        call(*arguments)
        spent = time.thread_time() - self._began_s
        self._spent_s += spent
        return spent

    def _take_verify(self, message: Message) -> None:
        if isinstance(message, Verify):
            self._critical_s = self._path_s + time.thread_time() - self._began_s
            self._sent.append(message)


class _Wire:
    """A channel that hands over at once."""

    def __init__(self, take: Callable[[Message], None]) -> None:
        self._take = take

    def send(self, message: Message) -> None:
        """Hand a message over."""
        self._take(message)

    def close(self) -> None:
        """Nothing is held."""


def _sender(message: Message) -> str:
    return "target" if isinstance(message, Verdict) else "draft"


def _verdict(verify: Verify, draws: np.random.Generator) -> Verdict:
    """Drafts are kept four times in five; the token after them is one that the draft ranked high there."""
    shape = len(verify.rows)
    kept = np.minimum(draws.geometric(0.2, shape) - 1, verify.chain_lengths).astype(np.int32)
    following = (_DRAWN + np.minimum(draws.geometric(0.7, shape), 3)).astype(np.int32)
    return Verdict(verify.round, verify.rows, verify.epochs, kept, np.where(verify.due, following, -1), 0.01, 0.001)


def _answers(message: Message, sampled: bool) -> Sequence[Message]:
    """What a draft worker says to it."""
    if isinstance(message, Plan):
        return [_push(message, sampled)]
    return _pushes_ahead(message, sampled) if isinstance(message, PlanAhead) else []


def _push(plan: Plan, sampled: bool) -> Push:
    total = int(plan.depths.sum())
    places = np.arange(total) - np.repeat(np.cumsum(plan.depths) - plan.depths, plan.depths)
    covered = plan.starts + plan.feed_lengths
    return Push(
        plan=plan.plan,
        rows=plan.rows,
        epochs=plan.epochs,
        bases=covered,
        covered=covered,
        chain_lengths=plan.depths,
        tokens=np.full(total, _DRAWN, dtype=np.int32),
        parents=(places - 1).astype(np.int32),
        slots=plan.slots,
        fed=places < np.repeat(plan.depths, plan.depths) - 1,
        sampled=np.ones(total, dtype=np.bool_),
        dists=_dists(total if sampled else 0),
        busy_s=_STEP_S,
    )


def _pushes_ahead(plan: PlanAhead, sampled: bool) -> list[PushAhead]:
    """Step by step: all guesses first, then one token for every branch that has begun."""
    ends = plan.firsts + plan.depths
    steps = max(1, int(ends.max(initial=0)))
    pushes = []
    for step in range(steps):
        grown = np.flatnonzero((plan.firsts <= step) & (step < ends)).astype(np.int32)
        guessed = np.arange(len(ends) if step == 0 else 0, dtype=np.int32)
        places = np.concatenate([np.full(len(guessed), -1), step - plan.firsts[grown]])
        tokens = np.concatenate([_DRAWN + 1 + plan.ranks[guessed], np.full(len(grown), _DRAWN)])
        pushes.append(
            PushAhead(
                plan=plan.plan,
                step=step,
                last=step == steps - 1,
                branches=np.concatenate([guessed, grown]),
                places=places.astype(np.int32),
                tokens=tokens.astype(np.int32),
                dists=_dists(len(grown) if sampled else 0),
                busy_s=_STEP_S,
            )
        )
    return pushes


def _dists(rows: int) -> Dists:
    """Dists of 64 ids each, whose content nobody reads here."""
    return Dists("sparse", 64, np.zeros((rows, 64 * 6), dtype=np.uint8)) if rows else Dists.none()
