"""`specserve bench rules`: what a rule's decision costs, in units of reading the target's logits once from memory.

Rules, and what comes before them (`process`: logits to dists), are timed on random rows with sparse drafts of 64 ids.
Rules that look at no dist past the first refused token are timed on chains that they keep whole, where they read most.
Cases rotate over copies of their inputs that together exceed the processor's caches, and so
does the read that they are compared with: a sum of the logits, measured between the rules of the same case. Times are
CPU time of all threads, so that other work on the machine counts as little as it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median

import torch

from specserve.bench.report import Row
from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.sampling.dists import draw, process
from specserve.sampling.noise import token_keys
from specserve.sampling.race import race
from specserve.verification import FixedNoise, Judge, RuleNoise, judges_of
from specserve.verification._draft_rows import DraftRows

Progress = Callable[[str], None]

_SUPPORT = 64
_COLD_BYTES = 128 << 20
"""Inputs of a case, all copies together; more than the last cache of most processors."""

_MOST_COPIES = 300
"""Copies of a case that is too small to fill the caches with."""

_MAX_BYTES = 2 << 30
"""Logits of one case; larger ones are left out."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run: every combination. repeats are timed passes of each; their median is reported."""

    batch: tuple[int, ...] = (1, 8, 64)
    depth: tuple[int, ...] = (1, 4, 8)
    vocab: tuple[int, ...] = (32_000, 152_000)
    repeats: int = 5

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if min(*self.batch, *self.depth, self.repeats, 1) < 1 or min(self.vocab) < _SUPPORT:
            raise ConfigError(f"--batch, --depth and --repeats take numbers from 1, --vocab from {_SUPPORT}")


@dataclass(frozen=True, slots=True)
class _Inputs:
    """One copy of what a rule is given; in place of `tokens`, the rules named in `picks` are given what they keep."""

    logits: torch.Tensor
    target: torch.Tensor
    draft: DraftRows
    tokens: torch.Tensor
    lengths: torch.Tensor
    noise: RuleNoise
    picks: Mapping[str, torch.Tensor]


def measure(options: Options, progress: Progress) -> list[Row]:
    """One row for each rule, batch, depth and vocabulary. Raises ConfigError."""
    options.check()
    return [
        row
        for vocab, batch, depth in product(options.vocab, options.batch, options.depth)
        for row in _case(batch, depth, vocab, options.repeats, progress)
    ]


def _case(batch: int, depth: int, vocab: int, repeats: int, progress: Progress) -> Iterator[Row]:
    size = batch * (depth + 1) * vocab * 4
    if size > _MAX_BYTES:
        progress(f"batch {batch}, depth {depth}, vocabulary {vocab}: left out, its logits have {size >> 20} MiB")
        return
    progress(f"batch {batch}, depth {depth}, vocabulary {vocab}")
    count = min(_MOST_COPIES, max(2, -(-_COLD_BYTES // (2 * size))))
    copies = [_inputs(batch, depth, vocab, seed) for seed in range(count)]
    read_ms = _median_ms(lambda one: one.logits.sum(), copies, repeats)
    for name, run in _kernels().items():
        ms = _median_ms(run, copies, repeats)
        yield {
            "rule": name,
            "batch": batch,
            "depth": depth,
            "vocab": vocab,
            "ms": ms,
            "read_ms": read_ms,
            "ratio": ms / read_ms,
        }


def _kernels() -> dict[str, Callable[[_Inputs], object]]:
    """What is timed, by name; `process` is what every rule needs before it, at temperature 1 without filters."""

    def processed(one: _Inputs) -> object:
        plain = torch.ones(len(one.logits))
        return process(one.logits, plain, plain, torch.zeros_like(plain, dtype=torch.int64), one.logits.shape[1])

    kernels: dict[str, Callable[[_Inputs], object]] = {"process": processed}
    judges = judges_of(EngineConfig(synthetic_acceptance=(0.8, 0.6, 0.4)))
    return kernels | {name: partial(_judge, name, judge) for name, judge in judges.items()}


def _judge(name: str, judge: Judge, one: _Inputs) -> object:
    return judge(one.target, one.draft, one.picks.get(name, one.tokens), one.lengths, one.noise)


def _inputs(batch: int, depth: int, vocab: int, seed: int) -> _Inputs:
    generator = torch.Generator().manual_seed(seed)
    rows = batch * (depth + 1)
    # Logits spread like a language model's: a few likely ids over a long tail.
    logits = torch.randn(rows, vocab, generator=generator) * 3
    target = torch.softmax(logits, -1).view(batch, depth + 1, vocab)
    probs, ids = target[:, :-1].topk(_SUPPORT, -1)
    draft = DraftRows(ids, probs / probs.sum(-1, keepdim=True))
    places = torch.randint(4, (batch, depth, 1), generator=generator)
    positions = torch.arange(depth + 1).expand(batch, -1)
    noise = FixedNoise(
        torch.rand(batch, depth, generator=generator).double(),
        torch.rand(batch, depth + 1, generator=generator).double(),
        token_keys(torch.arange(batch)[:, None], positions),
    )
    tokens = ids.gather(2, places).squeeze(2)
    own = {"exact": draw(target.flatten(0, 1), noise.choose.flatten())}
    own["coupled"] = race(target.flatten(0, 1), noise.keys.flatten(0, 1))
    picks = {name: ids.view(batch, depth + 1)[:, :-1].contiguous() for name, ids in own.items()}
    return _Inputs(logits, target, draft, tokens, torch.full((batch,), depth), noise, picks)


def _median_ms(run: Callable[[_Inputs], object], copies: Sequence[_Inputs], repeats: int) -> float:
    """Median over `repeats` passes of the mean CPU time per copy, after one pass that does not count."""
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            began = time.process_time()
            for one in copies:
                run(one)
            times.append((time.process_time() - began) * 1000 / len(copies))
    return median(times[1:])
