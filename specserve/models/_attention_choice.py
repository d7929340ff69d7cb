"""Which way of attending over pages a model takes on its device: of those that are there and right, the fastest.

Whether one is there is found out by using it: libraries come and go by version, device, dtype and head size, and what
says the same as gathering on made-up pages is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from specserve.models import RaggedBatch, _flash_attention, _moments, _varlen_attention
from specserve.models._pages import Gathered, LayerLayout, PagedAttention, Scoring
from specserve.models._row_groups import RaggedPlan

log = logging.getLogger("specserve")

Maker = Callable[[int, torch.device], PagedAttention]

KERNELS: Mapping[str, Maker] = {
    _varlen_attention.NAME: _varlen_attention.made,
    _flash_attention.NAME: _flash_attention.made,
}

_REPEATS = 20
_TOLERANCE = 0.02
"""Between ways, of values around 1 in bfloat16."""


def chosen(layers: Iterable[tuple[LayerLayout, int]], block_tokens: int, device: torch.device) -> PagedAttention:
    """The way for a model whose layers have these layouts and numbers of query heads.

    It is told in one line; on a CPU, where there is only one, without a word.
    """
    kinds = list(dict.fromkeys(layers))
    if device.type == "cpu" or not kinds:
        return Gathered()
    cases = [Case(layout, heads, block_tokens, device) for layout, heads in kinds]
    found, told = best(KERNELS, cases, block_tokens, device)
    if found.name != _varlen_attention.NAME:
        _varlen_attention.dismissed()
    log.info("paged attention: %s (%s)", found.name, told)
    return found


def best(
    kernels: Mapping[str, Maker],
    cases: list[Case],
    block_tokens: int,
    device: torch.device,
    seconds: Callable[[PagedAttention, list[Case]], float] | None = None,
) -> tuple[PagedAttention, str]:
    """The fastest way that is right in all cases, and what each takes, or why it is not there.

    seconds measures one; None is by the device's clock.
    """
    measure = _seconds if seconds is None else seconds
    ways: list[PagedAttention] = [Gathered()]
    told: list[str] = []
    for name, made in kernels.items():
        try:
            way = made(block_tokens, device)
            wrong = max(case.distance(way) for case in cases)
        except Exception as error:  # whatever a library raises about what it cannot do
            told.append(f"{name}: {type(error).__name__}: {_first_line(error)}")
            continue
        if not wrong <= _TOLERANCE:
            told.append(f"{name}: off by {wrong:.3g}")
            continue
        ways.append(way)
    times = {way.name: measure(way, cases) for way in ways}
    told = [f"{name}: {1000 * each:.3f} ms" for name, each in times.items()] + told
    return min(ways, key=lambda way: times[way.name]), "; ".join(told)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:120]


class Case:
    """One kind of layer with made-up pages; rows decode, verify and read a chunk of a prompt, in scattered blocks."""

    def __init__(self, layout: LayerLayout, heads: int, block_tokens: int, device: torch.device) -> None:
        self._layout = layout
        lengths, ends = np.array([1, 5, 1, 33, 5, 5]), np.array([700, 1030, 1, 64, 5, 257])
        width = int(-(-ends.max() // block_tokens))
        generator = torch.Generator().manual_seed(0)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator).to(device, layout.dtype)

        tables = np.random.default_rng(0).permutation(len(ends) * width).reshape(len(ends), width).astype(np.int32)
        self._keys = normal(tables.size * block_tokens, layout.kv_heads, layout.key_dim)
        self._values = normal(tables.size * block_tokens, layout.kv_heads, layout.value_dim)
        offsets = np.concatenate([[0], lengths.cumsum()])
        positions = np.concatenate([np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)])
        batch = RaggedBatch(np.zeros_like(positions), positions, offsets, tables, np.empty(0, np.int64))
        self._plan = RaggedPlan(batch, block_tokens, layout.dtype, device)
        self._query = normal(len(positions), heads, layout.key_dim)

    def attended(self, way: PagedAttention) -> torch.Tensor:
        """What a way finds."""
        return way.attend(self._query, self._keys, self._values, self._plan, self._layout.window, Scoring(None, None))

    def distance(self, way: PagedAttention) -> float:
        """The largest difference to gathering; NaN where there is one."""
        return float((self.attended(way).float() - self.attended(Gathered()).float()).abs().max())


def _seconds(way: PagedAttention, cases: list[Case]) -> float:
    """Of all cases once, by the device's own clock, after a run that does not count."""
    device = cases[0].attended(way).device
    began = _moments.now(device)
    for _ in range(_REPEATS):
        for case in cases:
            case.attended(way)
    return began.until(_moments.now(device)) / _REPEATS
