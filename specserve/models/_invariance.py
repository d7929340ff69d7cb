"""Batch invariance on a CPU: a row's logits are the same bits whatever shares its forwards and however it is cut.

Three things of a forward depend on company otherwise: the order of additions in matrix products (`_linear`), in
attention (`_invariant_step`), and activations, whose vectors end in a few elements that are computed one by one by
another formula; where these fall depends on the size of the whole tensor. What is left (norms, rotations, embeddings)
works on each row, or rounds each element once. Models and machines differ, so nothing is taken on trust: `check` reads
the same tokens in different company when the worker starts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers.activations import ACT2CLS

from specserve.errors import ConfigError
from specserve.models import Backend, _linear
from specserve.models._stretches import Stretch, ragged

_ROWS = 3
_LONGEST = 90
_CHAIN = 4


def make_invariant(model: nn.Module) -> None:
    """Replace the linear layers and activations of a float32 model on a CPU in place. Raises ConfigError for others."""
    _linear.make_invariant(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in _ACTIVATIONS:
                setattr(parent, name, _RowByRow(child))


_ACTIVATIONS = frozenset(entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values())


class _RowByRow(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        flat = values.reshape(-1, values.shape[-1])
        return torch.cat([self._activation(row) for row in torch.split(flat, 1)]).view(values.shape)


def check(backend: Backend, blocks: int, block_tokens: int) -> None:
    """Read a few rows token by token, and together in chunks. Raises ConfigError when a bit of their logits differs."""
    share = blocks // _ROWS
    length = min(_LONGEST, backend.context_length, share * block_tokens)
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, backend.vocab_size, length) for _ in range(_ROWS)]
    tables = [np.arange(row * share, (row + 1) * share, dtype=np.int32) for row in range(_ROWS)]
    # Each row first in one piece but for its end, which is read as chains are, and token by token.
    head = max(0, length - 3 * _CHAIN)
    alone = [
        _read(backend, [row], [table], [head] + [1] * (length - head)) for row, table in zip(rows, tables, strict=True)
    ]
    chains = [_CHAIN] * (-(-(length - head) // _CHAIN))
    # Side by side in halves and chains, and two of them in pieces of every small length.
    together = _read(backend, rows, tables, [head // 2, head - head // 2, *chains])
    few = _read(backend, rows[:2], tables[:2], _growing(length))
    whole = torch.cat(alone)
    if not torch.equal(whole, together) or not torch.equal(whole[: len(few)], few):
        raise ConfigError(
            "batch_invariant cannot be had: on this machine the logits of this model still depend on what shares their "
            "batch, by a rounding; switch engine.batch_invariant off"
        )


def _growing(length: int) -> list[int]:
    """1, 2, 3, … and what is left."""
    pieces: list[int] = []
    while sum(pieces) + len(pieces) + 1 < length:
        pieces.append(len(pieces) + 1)
    return [*pieces, length - sum(pieces)]


def _read(backend: Backend, rows: list[np.ndarray], tables: list[np.ndarray], pieces: list[int]) -> torch.Tensor:
    """The logits of all tokens of all rows, one row after the other, read side by side in pieces of these lengths."""
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    done = 0
    for piece in pieces:
        parts = [row[done : done + piece] for row in rows]
        count = len(parts[0])
        if count:
            stretches = [Stretch(done, part, table, count) for part, table in zip(parts, tables, strict=True)]
            for row, logits in enumerate(torch.split(backend.forward(ragged(stretches)), count)):
                found[row].append(logits)
        done += count
    return torch.cat([torch.cat(parts) for parts in found])
