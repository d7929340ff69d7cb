"""One model over several processes: rank 0 is the backend, the others compute what it tells them.

Rank 0 broadcasts each batch as int64 words and computes its own part; every rank then says how its part went. A batch
that did not fit into one rank's memory fails at rank 0 as if it had not fit there, so that it is halved as usual.
Options and rules are applied at rank 0 alone: ranks cannot disagree about a token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import Backend, RaggedBatch, _memory, _refusals, loading
from specserve.models._ranks import RankGroup
from specserve.models._wrapped import Wrapped
from specserve.models.paged_transformers import PagedTransformers

log = logging.getLogger(__name__)

_FORWARD, _COPY = 1, 2
_FIRST_WORDS = 512  # what is told at once; a usual batch fits, and a larger one needs a second exchange
_OUT_OF_MEMORY = "out of memory: "


def build(config: ModelConfig, folder: Path, ranks: RankGroup) -> Backend:
    """At rank 0 the whole model, at the others a part to `follow` with.

    Raises ConfigError for what cannot be served, or not by so many ranks.
    """
    refuse_undivided(config, folder)
    loading.apply_threads(config.threads)
    part = PagedTransformers(loading.load_model(folder, config, ranks=ranks), config.context_length)
    ranks.learned()  # the backend has had a first forward, to see what its layers keep
    return Leader(part, ranks) if ranks.rank == 0 else part


def refuse_undivided(config: ModelConfig, folder: Path) -> None:
    """Raise ConfigError for a model that several processes cannot hold, or not as many as are configured."""
    size = config.tensor_parallel
    if loading.backend_of(folder, config) != loading.PAGED:
        raise ConfigError(f"tensor_parallel {size}: {config.source!r} can only be held by one process; set it to 1")
    described = loading.load_model_config(folder, config)
    _refusals.refuse_unservable(described)
    heads = getattr(described, "num_attention_heads", 0)
    kv_heads = getattr(described, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        raise ConfigError(
            f"tensor_parallel {size} does not divide this model's {heads} attention heads and {kv_heads} key-value "
            f"heads; set it to a divisor of both"
        )


class Leader(Wrapped[PagedTransformers]):
    """Rank 0's `Backend`, which also `ShowsHidden`: every rank has the whole of the hidden states."""

    def __init__(self, part: PagedTransformers, ranks: RankGroup) -> None:
        super().__init__(part)
        self._ranks = ranks

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """Copy whole KV pages on every rank."""
        self._tell(_COPY, [np.array(sources, np.int64), np.array(copies, np.int64)])
        self._backend.copy_blocks(sources, copies)

    def make_batch_invariant(self) -> None:
        """Raises ConfigError: in which order a sum over ranks is made depends on its size, and so on company."""
        raise ConfigError("batch_invariant is not there for a target with tensor_parallel above 1")

    def observe(self, layers: Sequence[int]) -> None:
        """See `ShowsHidden`."""
        self._backend.observe(layers)

    def observed(self) -> torch.Tensor:
        """See `ShowsHidden`."""
        return self._backend.observed()

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See `Backend`. Raises GroupLost when the ranks have lost each other, else what any of them failed with."""
        columns = [batch.tokens, batch.positions, batch.offsets, batch.wanted, batch.tables.ravel().astype(np.int64)]
        self._tell(_FORWARD, columns)
        mine, reports = _computed(self._backend, self._ranks, batch)
        if isinstance(mine, Exception):
            raise mine
        _raise_any(reports)
        return mine

    def _tell(self, what: int, columns: Sequence[np.ndarray]) -> None:
        words = np.concatenate([np.array([what, *map(len, columns)], dtype=np.int64), *columns])
        words = np.pad(words, (0, max(0, _FIRST_WORDS - len(words))))
        self._ranks.tell(torch.from_numpy(words[:_FIRST_WORDS]))
        if len(words) > _FIRST_WORDS:
            self._ranks.tell(torch.from_numpy(words[_FIRST_WORDS:]))


def follow(part: Backend, ranks: RankGroup) -> None:
    """What every rank but 0 does for as long as it lives. Raises GroupLost at its end."""
    while True:
        what, columns = _told(ranks)
        if what == _COPY:
            part.copy_blocks(columns[0].tolist(), columns[1].tolist())
            continue
        tokens, positions, offsets, wanted, tables = columns
        rows = len(offsets) - 1
        batch = RaggedBatch(tokens, positions, offsets, tables.reshape(rows, -1).astype(np.int32), wanted)
        _computed(part, ranks, batch)


_COLUMNS = {_FORWARD: 5, _COPY: 2}


def _told(ranks: RankGroup) -> tuple[int, list[np.ndarray]]:
    """Kind and columns of what rank 0 tells next."""
    first = ranks.told(_FIRST_WORDS).numpy()
    what = int(first[0])
    lengths = first[1 : 1 + _COLUMNS[what]]
    head = 1 + len(lengths)
    total = head + int(lengths.sum())
    words = first
    if total > _FIRST_WORDS:
        words = np.concatenate([first, ranks.told(total - _FIRST_WORDS).numpy()])
    return what, np.split(words[head:total], np.cumsum(lengths)[:-1])


def _computed(part: Backend, ranks: RankGroup, batch: RaggedBatch) -> tuple[torch.Tensor | Exception, list[str]]:
    """This rank's logits, or what they failed with; at rank 0 also how all ranks fared."""
    mine = ranks.step(partial(part.forward, batch), len(batch.tokens), len(batch.wanted))
    text = ""
    if isinstance(mine, Exception):
        log.error("rank %d failed in a step: %s: %s", ranks.rank, type(mine).__name__, mine)
        reason = f"{type(mine).__name__}: {mine}"
        text = _OUT_OF_MEMORY + reason if _memory.is_out_of_memory(mine) else reason
    return mine, ranks.report(text)


def _raise_any(reports: Sequence[str]) -> None:
    for rank, text in enumerate(reports):
        if text.startswith(_OUT_OF_MEMORY):
            raise torch.OutOfMemoryError(f"rank {rank}: {text}")
    for rank, text in enumerate(reports):
        if text:
            raise RuntimeError(f"rank {rank} of the target failed: {text}")
