"""Float32 linear layers that cost the same for one row as for a few, on CPUs.

torch's plain product takes up to three times as long for 2 to 8 rows as for one, which is just the size of a
verification. oneDNN's packed weights do not; the packed form replaces the plain one. A head tied to the embedding
must stay plain, as the embedding reads it; there the product is taken with the weights on the left.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from specserve.errors import ConfigError

_USUAL_ROWS = 4  # oneDNN picks the packed layout for this many rows; others run on it as well
_MOST_FEW_ROWS = 32
_COLUMNS = 8


def speed_up(model: nn.Module) -> None:
    """Replace the linear layers of a float32 model on the CPU in place, where this torch has the operator."""
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses may compute something else.
            if type(child) is nn.Linear and child.weight.dtype == torch.float32 and child.weight.device.type == "cpu":
                setattr(parent, name, _SharedLinear(child) if id(child.weight) in shared else _PackedLinear(child))


class _PackedLinear(nn.Module):
    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), _USUAL_ROWS)
        self._bias = plain.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return result


class _SharedLinear(nn.Module):
    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias: torch.Tensor | None = plain.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.numel() // rows.shape[-1]
        if count == 0 or count > _MOST_FEW_ROWS or self.bias is not None:
            return linear(rows, self.weight, self.bias)
        # A product with one column runs on one thread; with two columns it does not.
        columns = rows.reshape(count, -1).repeat(2 if count == 1 else 1, 1).t()
        return (self.weight @ columns)[:, :count].t().reshape(*rows.shape[:-1], -1)


def make_invariant(model: nn.Module) -> None:
    """Let each row's result be the same bits in any batch, once `speed_up` replaced all linear layers of `model`.

    oneDNN takes another order of additions for a lone row only, so there is never one. The product with a shared weight
    takes it from the number of columns, so that is fixed. Raises ConfigError where a layer could not be replaced.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _PackedLinear):
                setattr(parent, name, _NeverLone(child))
            elif isinstance(child, _SharedLinear):
                setattr(parent, name, _FixedColumns(child))
            elif isinstance(child, nn.Linear):
                raise ConfigError(
                    f"batch_invariant needs float32 on a CPU whose torch has oneDNN; {name} of this model stays a "
                    f"plain linear layer ({child.weight.dtype} on {child.weight.device})"
                )


class _NeverLone(nn.Module):
    def __init__(self, packed: _PackedLinear) -> None:
        super().__init__()
        self._packed = packed

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() != rows.shape[-1]:
            return self._packed(rows)  # type: ignore[no-any-return]
        pair: torch.Tensor = self._packed(rows.reshape(1, -1).repeat(2, 1))
        return pair[:1].view(*rows.shape[:-1], -1)


class _FixedColumns(nn.Module):
    def __init__(self, shared: _SharedLinear) -> None:
        super().__init__()
        self.weight = shared.weight
        self.bias = shared.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        result = flat.new_empty(len(flat), len(self.weight))
        for start in range(0, len(flat), _COLUMNS):
            part = flat[start : start + _COLUMNS]
            columns = part.new_zeros(part.shape[1], _COLUMNS)
            columns[:, : len(part)] = part.t()
            result[start : start + _COLUMNS] = (self.weight @ columns)[:, : len(part)].t()
        biased = result if self.bias is None else result + self.bias
        return biased.view(*rows.shape[:-1], len(self.weight))
