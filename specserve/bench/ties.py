"""`specserve bench ties`: how often the shape of a batch alone flips a choice of the target.

A sum of floats depends on its order, and matrix kernels choose theirs by the number of rows. So a position that is
read alone, within a chain of 5, or beside 7 other requests may get logits that differ in their last bits, and where
two tokens nearly tie, another choice. This measures it: the same histories, read in these three shapes, by an
ordinary target and, where there can be one, by a batch-invariant one, with the CPU time that each takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import process_time

import numpy as np
import torch

from specserve.bench.compare import chat_prompts
from specserve.bench.report import Row
from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models import Backend
from specserve.models._stretches import Stretch, ragged
from specserve.models._worker import load_backend
from specserve.models.loading import prepare
from specserve.sampling.dists import process
from specserve.sampling.noise import token_keys
from specserve.sampling.race import race
from specserve.text import Tokenizer

Progress = Callable[[str], None]

ROWS = 8
CHAIN = 5

_NEAR = 0.25


@dataclass(frozen=True, slots=True)
class _Text:
    """One history with a KV of its own in each shape: tokens, and block tables by shape."""

    tokens: list[int]
    prompt: int
    tables: dict[str, np.ndarray]


class _Stopwatch:
    """Median CPU milliseconds of forwards, all threads together, by what was read."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def read(self, shape: str, stretches: Sequence[Stretch]) -> torch.Tensor:
        """The logits of one forward, which counts for this shape."""
        began = process_time()
        logits = self._backend.forward(ragged(stretches))
        self._seconds[shape].append(process_time() - began)
        return logits

    def ms(self, shape: str) -> float:
        """Of the forwards of a shape."""
        return 1000 * median(self._seconds[shape])


def measure(config: Config, positions: int, progress: Progress) -> list[Row]:
    """One row for each target and shape, compared with reading one position at a time; positions is rounded up to 8
    texts'.

    Raises ConfigError when the target's KV has no room for the texts.
    """
    rows = _measure(config, False, positions, progress)
    try:
        return rows + _measure(config, True, positions, progress)
    except ConfigError as error:
        progress(f"no batch-invariant target: {error.message}")
        return rows


def _measure(config: Config, invariant: bool, positions: int, progress: Progress) -> list[Row]:
    engine = config.engine.model_copy(update={"batch_invariant": invariant})
    folder = prepare(config.target, progress, role="target")
    backend, info = load_backend(config.target, "target", engine)
    prompts = chat_prompts(Tokenizer.load(folder), ROWS)
    count = -(-positions // (ROWS * CHAIN)) * CHAIN
    texts = list(_texts(prompts, count, engine.block_tokens))
    blocks = sum(len(table) for text in texts for table in text.tables.values())
    if blocks > info.blocks:
        raise ConfigError(f"three readings of all texts need {blocks} KV blocks, target.kv_blocks gave {info.blocks}")
    watch = _Stopwatch(backend)
    progress(f"{'batch-invariant' if invariant else 'ordinary'} target: {ROWS} texts, {count} positions each")
    alone = torch.stack([_write(watch, text, count) for text in texts])
    compared = {"chain": _in_chains(watch, texts, count), "beside": _side_by_side(watch, texts, count)}
    names = {"chain": f"chain of {CHAIN}", "beside": f"{ROWS} rows"}
    return [
        {
            "target": "batch-invariant" if invariant else "ordinary",
            "shape": names[shape],
            **_compare(alone, logits, info.vocab_size),
            "cpu_ms": watch.ms(shape),
            "cpu_ms_alone": watch.ms("alone"),
            "cpu_ms_prompt": watch.ms("prompt"),
        }
        for shape, logits in compared.items()
    ]


def _texts(prompts: Sequence[list[int]], count: int, block_tokens: int) -> Iterator[_Text]:
    block = 0
    for prompt in prompts:
        need = -(-(len(prompt) + count) // block_tokens)
        tables = {}
        for shape in ("alone", "chain", "beside"):
            tables[shape] = np.arange(block, block + need, dtype=np.int32)
            block += need
        yield _Text(list(prompt), len(prompt), tables)


def _write(watch: _Stopwatch, text: _Text, count: int) -> torch.Tensor:
    """Extend a text greedily, one position at a time; logits [count, V] of what was read."""
    for table in text.tables.values():
        watch.read("prompt", [Stretch(0, text.tokens[:-1], table, 0)])
    read = []
    for _ in range(count):
        at = len(text.tokens) - 1
        logits = watch.read("alone", [Stretch(at, text.tokens[at:], text.tables["alone"], 1)])
        read.append(logits[0])
        text.tokens.append(int(logits[0].argmax()))
    return torch.stack(read)


def _in_chains(watch: _Stopwatch, texts: Sequence[_Text], count: int) -> torch.Tensor:
    return torch.stack(
        [
            torch.cat([watch.read("chain", [_stretch(text, "chain", done, CHAIN)]) for done in range(0, count, CHAIN)])
            for text in texts
        ]
    )


def _side_by_side(watch: _Stopwatch, texts: Sequence[_Text], count: int) -> torch.Tensor:
    steps = [watch.read("beside", [_stretch(text, "beside", done, 1) for text in texts]) for done in range(count)]
    return torch.stack(steps, 1)


def _stretch(text: _Text, shape: str, done: int, length: int) -> Stretch:
    at = text.prompt - 1 + done
    return Stretch(at, text.tokens[at : at + length], text.tables[shape], length)


def _compare(alone: torch.Tensor, other: torch.Tensor, vocab_size: int) -> dict[str, int | float]:
    picks = [_picks(logits.flatten(0, 1), vocab_size) for logits in (alone, other)]
    greedy, coupled = (int((a != b).sum()) for a, b in zip(*picks, strict=True))
    return {
        "positions": alone.shape[0] * alone.shape[1],
        "bit_equal_rows": int((alone == other).all(-1).sum()),
        "largest_logit_difference": float((alone - other).abs().max()),
        "greedy_flips": greedy,
        "coupled_flips": coupled,
        "expected_greedy_flips_per_million": 1e6 * _flip_rate(alone.flatten(0, 1), other.flatten(0, 1), vocab_size),
    }


def _flip_rate(alone: torch.Tensor, other: torch.Tensor, vocab_size: int) -> float:
    """How often the two likeliest tokens should change places, by how close they come and how much shapes move them.

    A gap g flips when it moves by more than g. Gaps near 0 have a density f, taken from those below `_NEAR`; so the
    rate is f · E|movement| / 2, which a few hundred positions show long before the first flip.
    """
    values, ids = alone[:, :vocab_size].topk(2, -1)
    gaps = values[:, 0] - values[:, 1]
    moved = other.gather(1, ids)
    movement = (moved[:, 0] - moved[:, 1] - gaps).abs().mean()
    return float((gaps < _NEAR).float().mean() / _NEAR * movement / 2)


def _picks(logits: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The greedy choice and the race at temperature 1 of each row."""
    plain = torch.ones(len(logits))
    dist = process(logits, plain, plain, torch.zeros(len(logits), dtype=torch.int64), vocab_size)
    keys = token_keys(torch.tensor([0]), torch.arange(len(logits)))
    return logits[:, :vocab_size].argmax(-1), race(dist, keys.to(dist.device))
