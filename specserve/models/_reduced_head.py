"""A head that speaks of a part of the vocabulary only: on a CPU most of a small draft's step is its head.

A folder asks for it with a file beside its weights. Logits keep the full width, so that nobody else has to know:
ids outside the part have a logit of −∞, no mass, and are never drafted. For a target that would change its dist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from specserve.errors import ConfigError

FILE = "reduced_head.safetensors"


class ReducedHead(nn.Module):
    """Logits [..., vocab_size] of hidden [..., width]. weight [m, width]; ids int64 [m], distinct."""

    def __init__(self, weight: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        self.part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
        self.part.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("ids", ids, persistent=False)
        self.ids: torch.Tensor
        self.vocab_size = vocab_size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.part(hidden)
        logits: torch.Tensor = found.new_full((*found.shape[:-1], self.vocab_size), float("-inf"))
        return logits.index_copy_(-1, self.ids, found)


def write(folder: Path, weight: torch.Tensor, ids: torch.Tensor) -> None:
    """Give a model folder a reduced head: weight [m, width] for these ids int64 [m]."""
    save_file({"weight": weight.contiguous(), "ids": ids.int()}, folder / FILE)


def put_in_place(model: Any, folder: Path) -> None:
    """Replace the model's head where its folder has a reduced one. Raises ConfigError when that does not fit."""
    path = folder / FILE
    if not path.is_file():
        return
    found = load_file(path)
    weight, ids = found["weight"].to(model.dtype), found["ids"].long()
    vocab_size, width = model.config.vocab_size, model.config.hidden_size
    if (
        weight.shape != (len(ids), width)
        or len(ids.unique()) < len(ids)
        or not 0 <= ids.min() <= ids.max() < vocab_size
    ):
        raise ConfigError(
            f"{path} holds a head of shape {list(weight.shape)} for {len(ids)} ids, which does not fit a model of "
            f"width {width} with {vocab_size} ids"
        )
    model.set_output_embeddings(ReducedHead(weight, ids, vocab_size))
