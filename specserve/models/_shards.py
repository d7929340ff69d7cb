"""The layers of a sharded model, with plain local weights: each rank holds its part and exchanges as little as can be.

Which layer is cut in which direction is told by transformers' own plan for the model (`base_model_tp_plan` in its
configuration), and transformers reads each rank's part of the weights. What runs afterwards is this: columns of
queries, keys, values, gate and up are of one rank alone, rows of the products behind them are summed over all ranks
(Shoeybi et al. 2019, Megatron-LM), and logits are put together at rank 0, which alone chooses tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from specserve.errors import ConfigError
from specserve.models._ranks import RankGroup, shares


class SummedLinear(nn.Module):
    """rows [..., a rank's share of the inputs] → [..., outputs], summed over the ranks."""

    def __init__(self, part: nn.Linear, bias: torch.Tensor | None, ranks: RankGroup) -> None:
        super().__init__()
        self.part = part
        self._bias = bias
        self._ranks = ranks

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result = self._ranks.sum(self.part(rows))
        return result if self._bias is None else result + self._bias


class SummedEmbedding(nn.Module):
    """ids [...] → [..., width]: each rank looks up the ids of its share of the vocabulary."""

    def __init__(self, weight: torch.Tensor, first: int, scale: torch.Tensor | None, ranks: RankGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._first = first
        self._scale = scale
        self._ranks = ranks

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mine = ids - self._first
        here = (mine >= 0) & (mine < len(self.weight))
        found = nn.functional.embedding(mine.where(here, 0), self.weight)
        found = self._ranks.sum(found * here[..., None])
        return found if self._scale is None else found * self._scale.to(found.dtype)


class CollectedHead(nn.Module):
    """rows [..., width] → logits [..., vocab_size] at rank 0. The others' logits are zeros, which nobody reads."""

    def __init__(self, part: nn.Linear, width: int, vocab_size: int, ranks: RankGroup) -> None:
        super().__init__()
        self.part = part
        self._width = width
        self._vocab_size = vocab_size
        self._ranks = ranks

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mine = self.part(rows)
        mine = nn.functional.pad(mine, (0, self._width - mine.shape[-1]))
        parts = self._ranks.collect(mine)
        if parts is None:
            return mine.new_zeros(()).expand(*rows.shape[:-1], self._vocab_size)
        return torch.cat(parts, dim=-1)[..., : self._vocab_size]


def put_in_place(model: Any, ranks: RankGroup) -> None:
    """Replace what transformers cut by the layers above. Raises ConfigError for other ways of cutting."""
    styles: dict[str, str] = model.tp_plan
    modules = dict(model.named_modules())
    heads = [model.get_output_embeddings()]
    for name, module in modules.items():
        style = styles.get(_pattern(name))
        if style is None:
            continue
        if style not in _LAYERS or (style == _GATHERED and module not in heads):
            known = ", ".join(sorted(_LAYERS))
            raise ConfigError(f"tensor_parallel: {name} of this model is cut in the way {style!r}; served are {known}")
        parent, _, last = name.rpartition(".")
        setattr(modules[parent], last, _LAYERS[style](module, ranks))
    left = [name for name, weight in model.named_parameters() if isinstance(weight.data, DTensor)]
    if left:
        raise ConfigError(f"tensor_parallel: the plan of this model also cuts {left[0]}, which is not served")


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _columns(module: Any, ranks: RankGroup) -> nn.Linear:
    del ranks
    return _plain(_local(module.weight), None if module.bias is None else _local(module.bias))


def _rows(module: Any, ranks: RankGroup) -> nn.Module:
    bias = None if module.bias is None else _local(module.bias)
    return SummedLinear(_plain(_local(module.weight), None), bias, ranks)


def _embedding(module: Any, ranks: RankGroup) -> nn.Module:
    first, _ = shares(module.weight.shape[0], ranks.size)[ranks.rank]
    return SummedEmbedding(_local(module.weight), first, getattr(module, "embed_scale", None), ranks)


def _head(module: Any, ranks: RankGroup) -> nn.Module:
    vocab_size = module.weight.shape[0]
    _, widest = shares(vocab_size, ranks.size)[0]
    return CollectedHead(_columns(module, ranks), widest, vocab_size, ranks)


def _as_it_is(module: Any, ranks: RankGroup) -> nn.Module:
    del ranks
    module.__dict__.pop("forward", None)  # transformers' hook, which is there for training only
    return cast(nn.Module, module)


_GATHERED = "colwise_gather_output"
"""Served for the head only, whose result nobody but rank 0 needs."""

_LAYERS: dict[str, Callable[[Any, RankGroup], nn.Module]] = {
    "colwise": _columns,
    "rowwise": _rows,
    "embedding_rowwise": _embedding,
    _GATHERED: _head,
    "replicated_with_grad_allreduce": _as_it_is,
}


def _local(weight: torch.Tensor) -> torch.Tensor:
    data = weight.data
    return data.to_local() if isinstance(data, DTensor) else data


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """An ordinary linear layer, so that it is packed where all are."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
