"""Linear layers that read the same input (queries, keys and values; gate and up), computed as one product.

The models' own code stays as it is, so it still calls each of them; see `_Joint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def replace(
    parent: nn.Module, layers: Mapping[str, nn.Linear], product: Callable[[Sequence[nn.Linear]], nn.Module]
) -> None:
    """Put products in place of these children of `parent`, one for those that read the same input.

    product makes what computes layers of one input side by side, [..., inputs] → [..., all outputs].
    """
    single = dict(layers)
    for names in _SAME_INPUT:
        together = [single[name] for name in names if name in single]
        if len(together) == len(names) and _fit_together(together):
            joint = _Joint([single.pop(name).out_features for name in names], product(together))
            for index, name in enumerate(names):
                setattr(parent, name, _Part(joint, index))
    for name, child in single.items():
        setattr(parent, name, product([child]))


def product_of(first: nn.Module) -> nn.Module | None:
    """What all layers share that read the input of `first` (such as `q_proj`); None where it is on its own."""
    return first.product if isinstance(first, _Part) and first.index == 0 else None


def _fit_together(layers: Sequence[nn.Linear]) -> bool:
    return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1


class _Joint:
    """One product for several layers that a model calls one after the other with the same input.

    The first call computes all, the others find their part. Any other order or input is right as well, and wasteful.
    What was computed is kept until each part was fetched.
    """

    def __init__(self, widths: Sequence[int], product: nn.Module) -> None:
        self.product = product
        self._widths = list(widths)
        self._rows: torch.Tensor | None = None
        self._found: dict[int, torch.Tensor] = {}

    def part(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """The product of layer `index`, a view [..., its outputs]."""
        if rows is not self._rows or index not in self._found:
            self._rows = rows
            self._found = dict(enumerate(self.product(rows).split(self._widths, dim=-1)))
        mine = self._found.pop(index)
        if not self._found:
            self._rows = None
        return mine


class _Part(nn.Module):
    """What stands where one layer of several stood; the first of them owns what they share."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        self._joint = joint
        self.index = index
        if index == 0:
            self.product = joint.product

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._joint.part(self.index, rows)
