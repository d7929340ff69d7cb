"""`specserve bench curves`: what a step of the target costs by context length and by running requests.

Beside each time stands the least that it could be on this machine (the roofline of Williams et al. 2009): the bytes of
weights and keys and values over the bandwidth of a copy, counted as read plus written, or the multiplications over the
rate of a large product, whichever is more. Both are measured between the steps, so that a disturbance of the machine
hits all alike; all cases are run in turn, and the fastest of `repeats` turns counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specserve.bench.report import Row
from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models import Backend, RaggedBatch, _memory_plan, loading
from specserve.models._stretches import Stretch, ragged
from specserve.models._worker import load_backend

Progress = Callable[[str], None]

_COPIED_BYTES = 128 << 20  # more than the last cache of most processors
_PRODUCT = 1024


@dataclass(frozen=True, slots=True)
class Options:
    """What to run: one request at each context, and each number of requests at the shortest, by positions per request.

    positions 1 is a plain decode step, depth + 1 a verification. repeats are timed turns.
    """

    contexts: tuple[int, ...] = (128, 512, 1024, 2048, 4096)
    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    positions: tuple[int, ...] = (1, 5)
    repeats: int = 5

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if min(*self.contexts, *self.requests, *self.positions, self.repeats, 1) < 1:
            raise ConfigError("--context, --requests, --positions and --repeats take numbers from 1")

    def cases(self) -> list[Case]:
        """Every case once, in order."""
        along = [(1, context) for context in self.contexts]
        across = [(requests, min(self.contexts)) for requests in self.requests]
        pairs = list(dict.fromkeys(along + across))
        return [Case(requests, positions, context) for positions in self.positions for requests, context in pairs]


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that are alike: each writes `positions` tokens behind `context` others."""

    requests: int
    positions: int
    context: int

    def blocks(self, block_tokens: int) -> int:
        """KV blocks of one request."""
        return -(-(self.context + self.positions) // block_tokens)

    def batch(self, block_tokens: int, vocab_size: int) -> RaggedBatch:
        """Requests that grew side by side: their blocks alternate."""
        tokens = np.random.default_rng(0).integers(0, vocab_size, (self.requests, self.positions))
        tables = np.arange(self.requests * self.blocks(block_tokens), dtype=np.int32).reshape(-1, self.requests).T
        return ragged(
            [Stretch(self.context, row, table, self.positions) for row, table in zip(tokens, tables, strict=True)]
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of the machine: bytes per second of a copy (read + written), operations per second."""

    bandwidth: float
    operations: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a step takes: bytes of the weights that it reads, and of keys and values per position of each request."""

    weights_bytes: int
    kv_bytes: float
    weight_bytes_each: float

    def least_s(self, case: Case, machine: Machine) -> float:
        """Seconds that no step can be faster than."""
        read = self.weights_bytes + self.kv_bytes * case.requests * (case.context + case.positions)
        operations = 2 * self.weights_bytes / self.weight_bytes_each * case.requests * case.positions
        return max(read / machine.bandwidth, operations / machine.operations)


def measure(config: Config, options: Options, progress: Progress) -> list[Row]:
    """One row for each case. Raises ConfigError for what cannot be run."""
    options.check()
    cases, block_tokens = options.cases(), config.engine.block_tokens
    progress("loading the target")
    backend, work = _loaded(config, cases)
    if (longest := max(case.context + case.positions for case in cases)) > backend.context_length:
        raise ConfigError(f"--context: {longest} positions are more than the target's {backend.context_length}")
    batches = [case.batch(block_tokens, backend.vocab_size) for case in cases]
    machine, seconds = _timed(backend, batches, options.repeats, progress)
    return [_row(case, best, work, machine) for case, best in zip(cases, seconds, strict=True)]


def _loaded(config: Config, cases: Sequence[Case]) -> tuple[Backend, Work]:
    folder = loading.prepare(config.target, lambda _: None, role="target")
    described = loading.load_model_config(folder, config.target)
    each = config.engine.block_tokens
    longest = -(-(config.target.context_length or described.max_position_embeddings) // each)
    blocks = max(longest, *(case.requests * case.blocks(each) for case in cases))
    backend, info = load_backend(config.target.model_copy(update={"kv_blocks": blocks}), "target", config.engine)
    if backend.device.type != "cpu":
        raise ConfigError(f"bench curves measures CPUs; this target is on {backend.device}")
    item = getattr(torch, config.target.dtype).itemsize
    embedding = int(described.vocab_size) * int(described.hidden_size)
    # Of an embedding that no head shares a step looks up a few rows; a rounded head shares none.
    multiplied = _memory_plan.weight_bytes(folder, config.target) // item
    multiplied -= 0 if described.tie_word_embeddings else embedding
    shared = described.tie_word_embeddings and info.quantization == "none"
    read = info.weights_bytes - (0 if shared else embedding * item)
    return backend, Work(read, backend.bytes_per_block(each) / each, read / multiplied)


def _timed(
    backend: Backend, batches: Sequence[RaggedBatch], repeats: int, progress: Progress
) -> tuple[Machine, list[float]]:
    """The machine, and the fastest seconds of each batch."""
    source, copy = torch.ones(_COPIED_BYTES // 4), torch.empty(_COPIED_BYTES // 4)
    square = torch.ones(_PRODUCT, _PRODUCT)
    runs: list[Callable[[], object]] = [lambda: copy.copy_(source), lambda: square @ square]
    runs += [lambda batch=batch: backend.forward(batch) for batch in batches]  # type: ignore[misc]
    for run in runs:  # first-time allocations belong to nobody
        run()
    best = [float("inf")] * len(runs)
    for turn in range(repeats):
        progress(f"turn {turn + 1} of {repeats}")
        for index, run in enumerate(runs):
            best[index] = min(best[index], _seconds(run))
    return Machine(2 * _COPIED_BYTES / best[0], 2 * _PRODUCT**3 / best[1]), best[2:]


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _row(case: Case, seconds: float, work: Work, machine: Machine) -> Row:
    read = work.weights_bytes / seconds
    return {
        "requests": case.requests,
        "positions": case.positions,
        "context": case.context,
        "ms": 1000 * seconds,
        "least_ms": 1000 * work.least_s(case, machine),
        "weights_gb_per_s": read / 1e9,
        "share_of_copy": read / machine.bandwidth,
        "copy_gb_per_s": machine.bandwidth / 1e9,
    }
