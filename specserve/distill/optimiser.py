"""AdamW whose steps take into account how large the inputs of a matrix are.

Adam changes all weights by about the rate, so an input moves what comes out in proportion to its own size. What a head
reads are inputs of very different sizes: an embedding of about 0.1 beside a hidden state of about 1, with one place
of 18. The largest decides how high a rate does no harm, and at that rate the small ones are hardly taught. Here the
change of every column is divided by the size of its input, with the median's as measure: as if all had one size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_SMALLEST = 0.02
"""Inputs are taken for no smaller than this share of the median."""

_COLUMNS = "columns"


class InputScaledAdamW(torch.optim.AdamW):
    """A group for each matrix, with the factor of each of its columns, [inputs]; they are saved with the state."""

    def __init__(self, student: nn.Module, *, weight_decay: float) -> None:
        self._modules = [module for module in student.modules() if isinstance(module, nn.Linear)]
        groups: list[dict[str, Any]] = [
            {"params": [module.weight], _COLUMNS: torch.ones_like(module.weight[0])} for module in self._modules
        ]
        matrices = {id(module.weight) for module in self._modules}
        others = [weight for weight in student.parameters() if id(weight) not in matrices]
        super().__init__(groups + [{"params": others}] * bool(others), betas=(0.9, 0.95), weight_decay=weight_decay)

    @torch.no_grad()
    def measure(self, forward: Callable[[], object]) -> None:
        """Take the sizes of inputs, as root mean squares, from what the matrices read in this forward."""
        squares: dict[int, list[torch.Tensor]] = {}

        def read(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].detach().float().flatten(0, -2)
            squares.setdefault(id(module), []).append(rows.square().mean(0))

        hooks = [module.register_forward_pre_hook(read) for module in self._modules]
        try:
            forward()
        finally:
            for hook in hooks:
                hook.remove()
        for module, group in zip(self._modules, self.param_groups, strict=False):
            if id(module) in squares:
                sizes = torch.stack(squares[id(module)]).mean(0).sqrt()
                middle = sizes.median().clamp(min=torch.finfo(sizes.dtype).tiny)
                group[_COLUMNS] = middle / sizes.clamp(min=_SMALLEST * float(middle))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of AdamW, the change of every column times its factor."""
        del closure
        scaled = [(group["params"][0], group[_COLUMNS]) for group in self.param_groups if _COLUMNS in group]
        before = [weight.clone() for weight, _ in scaled]
        super().step()
        for (weight, factors), old in zip(scaled, before, strict=True):
            weight.sub_(old).mul_(factors).add_(old)
