"""The target's steps of one token in each of many rows, all at places of their own.

In float32 that is a backend that serves, whose forward on a CPU is one call of C for the Llama kind.
In bfloat16 the model runs as transformers has it, with attention for exactly this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import RaggedBatch, _attention, loading, paged_transformers

_BLOCK = 16  # positions
_PIECE = 128  # positions


class Steps(Protocol):
    """Rows that are there once and for all; what is fed at a position is behind all that was fed below it."""

    def run(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed each row one token int64 [n] at its position int64 [n]: float32 logits [n, V], hidden [n, width]."""
        ...


def of(target: ModelConfig, rows: int, longest: int) -> Steps:
    """Steps of the model that is configured, whose source is a folder; no position reaches longest."""
    return Paged(target, rows, longest) if target.dtype == "float32" else Plain(target, rows)


class Paged:
    """By the backend that serves such models. Each row has pages of its own."""

    def __init__(self, target: ModelConfig, rows: int, longest: int) -> None:
        blocks = -(-longest // _BLOCK)
        self._tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
        self._backend = paged_transformers.build(target, Path(target.source))
        self._backend.allocate(rows * blocks, _BLOCK)
        self._backend.observe([])

    def run(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Steps`."""
        each = np.arange(len(tokens) + 1)
        batch = RaggedBatch(tokens.numpy(), positions.numpy(), each, self._tables, wanted=each[:-1])
        logits = self._backend.forward(batch)
        return logits.cpu(), self._backend.observed().cpu()


class Plain:
    """By the model's own code."""

    def __init__(self, target: ModelConfig, rows: int) -> None:
        self._model = loading.load_model(Path(target.source), target, attention=_attention.NAME)
        self._store = _OnePerRow(rows, self._model.dtype, self._model.device)

    @torch.inference_mode()
    def run(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Steps`."""
        tokens, positions = tokens.to(self._model.device), positions.to(self._model.device)
        self._store.at(positions)
        hidden = self._model.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged=self._store
        ).last_hidden_state[0]
        return self._model.lm_head(hidden).float().cpu(), hidden.cpu()


class _OnePerRow:
    """A `KeyValueStore` for steps of one token in each of n rows.

    Keys and values lie in pieces [n · kv_heads, positions, dim] of neighbouring positions: torch copies what it
    multiplies in a batch unless that is contiguous, and a step looks at no more pieces than it must.
    """

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._pieces = 0
        self._piece = self._place = torch.zeros(rows, dtype=torch.int64, device=device)
        self._mask = torch.empty(0)

    def at(self, positions: torch.Tensor) -> None:
        """The next step writes at these positions, one in each row."""
        self._pieces = int(positions.max()) // _PIECE + 1
        self._piece, self._place = positions // _PIECE, positions % _PIECE
        hidden = torch.arange(self._pieces * _PIECE, device=positions.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device)
        self._mask = mask.masked_fill_(hidden, float("-inf"))[:, None]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `KeyValueStore.attend`; explicit products, as torch's fused ones are three times slower in bfloat16.

        Raises ConfigError for what is not done here.
        """
        if softcap is not None or (window is not None and window < self._pieces * _PIECE):
            raise ConfigError("a target with capped scores or short windows cannot write its own corpus; give a file")
        pieces = self._written(layer, key, value)
        rows, heads, dim = query.shape
        grouped = query.view(rows * key.shape[1], -1, dim)
        scores = torch.cat([torch.bmm(grouped, keys.transpose(1, 2)) for keys, _ in pieces], -1)
        masked = scores.view(rows, heads, -1) * (scaling or dim**-0.5) + self._mask
        weights = torch.split(torch.softmax(masked, -1).view(scores.shape), _PIECE, -1)
        attended = sum(torch.bmm(weight, values) for weight, (_, values) in zip(weights, pieces, strict=True))
        return torch.as_tensor(attended).reshape(rows, heads, -1)

    def _written(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The layer's pieces after the new keys and values [n, kv_heads, dim] were put into them."""
        pieces = self._kept.setdefault(layer, [])
        while len(pieces) < self._pieces:
            pieces.append((_empty(key), _empty(value)))
        for number in torch.unique(self._piece).tolist():
            here = (self._piece == number).nonzero().squeeze(1)
            for kept, new in zip(pieces[number], (key, value), strict=True):
                kept.view(len(new), -1, *kept.shape[1:])[here, :, self._place[here]] = new[here]
        return pieces[: self._pieces]


def _empty(new: torch.Tensor) -> torch.Tensor:
    return new.new_zeros(new.shape[0] * new.shape[1], _PIECE, new.shape[2])
