"""Float32 linear layers that cost the same for one row as for a few, on CPUs.

torch's plain product takes up to three times as long for 2 to 8 rows as for one, which is just the size of a
verification. Packed weights do not: our own kernels' (`_panels`) where they can be compiled, else oneDNN's. The packed
form replaces the plain one. A head tied to the embedding is packed too, so its weight is held twice: the embedding
reads rows of it, which the packed form does not show.

Layers that read the same input (queries, keys and values; gate and up) become one product: at batch 1 a layer of a
small model takes less time than threads need to meet before and after it. The models' own code stays as it is, so it
still calls each of them; see `_Joint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import nn

from specserve.errors import ConfigError
from specserve.models import _panels
from specserve.models._int8 import Int8Linear
from specserve.models._panels import Panels

_USUAL_ROWS = 4  # oneDNN picks the packed layout for this many rows; others run on it as well
_INVARIANT_ROWS = 2  # from here on oneDNN adds in the same order whatever the number of rows
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _cheapest_rows() -> int:
    """Up to this many rows, more of them take no longer: with AVX-512, 4 rows take a seventh less than one."""
    return 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


def speed_up(model: nn.Module) -> None:
    """Replace the linear layers of a float32 model on the CPU in place, where anything here can compute the others."""
    if _panels.kernels() is None and not _has_onednn():
        return
    for parent in list(model.modules()):
        plain = {name: child for name, child in parent.named_children() if _can_be_packed(child)}
        for names in _SAME_INPUT:
            together = [plain[name] for name in names if name in plain]
            if len(together) == len(names) and _fit_together(together):
                joint = _Joint([plain.pop(name) for name in names])
                for index, name in enumerate(names):
                    setattr(parent, name, _Part(joint, index))
        for name, child in plain.items():
            setattr(parent, name, PackedLinear([child]))


def reads_int8(dtype: str, device: torch.device) -> bool:
    """Whether int8 weights of a model of this dtype stay int8 once it is sped up; else they are written out."""
    return dtype == "float32" and device.type == "cpu" and _panels.kernels() is not None


def _has_onednn() -> bool:
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def make_invariant(model: nn.Module) -> None:
    """Let each row's result be the same bits in any batch, once `speed_up` replaced all linear layers of `model`.

    Raises ConfigError where a layer could not be replaced.
    """
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.make_invariant()
        elif isinstance(module, nn.Linear):
            raise ConfigError(
                f"batch_invariant needs float32 on a CPU with a C compiler, or whose torch has oneDNN; a layer of this "
                f"model stays a plain linear layer ({module.weight.dtype} on {module.weight.device})"
            )


def joint_product(first: nn.Module) -> PackedLinear | None:
    """The product of all layers that `first` (such as `q_proj`) shares its input with; None where it is on its own."""
    return getattr(first, "product", None) if isinstance(first, _Part) else None


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    # Other subclasses may compute something else.
    if type(module) is not nn.Linear and type(module) is not Int8Linear:
        return False
    return module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"


def _fit_together(layers: Sequence[nn.Linear]) -> bool:
    return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1


class PackedLinear(nn.Module):
    """The products of linear layers with one input, side by side. rows [..., width] → [..., all outputs]."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        library = _panels.kernels()
        self._product: Panels | OneDnn = OneDnn(layers) if library is None else Panels(layers, library)

    @property
    def panels(self) -> Panels | None:
        """The layers as our own kernels read them, None where they are oneDNN's."""
        return self._product if isinstance(self._product, Panels) else None

    def make_invariant(self) -> None:
        """See the function of that name; panels need nothing."""
        if isinstance(self._product, OneDnn):
            self._product.fewest_rows = max(self._product.fewest_rows, _INVARIANT_ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result = self._product(rows.reshape(-1, rows.shape[-1]))
        return result.view(*rows.shape[:-1], result.shape[-1])


class OneDnn:
    """The same by oneDNN. Fewer rows than `fewest_rows` are made up to that number, which changes no row's result but
    for roundings; it takes another order of additions for a lone row only.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _USUAL_ROWS)
        self._bias = torch.cat(biases) if biases else None
        self.fewest_rows = _cheapest_rows()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, inputs] → [n, all outputs]."""
        count = len(rows)
        if 0 < count < self.fewest_rows:
            rows = _filled_up(rows, self.fewest_rows)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return result[:count]


def _filled_up(rows: torch.Tensor, count: int) -> torch.Tensor:
    if len(rows) == 1:
        return rows.expand(count, -1).contiguous()
    return torch.cat([rows, rows[:1].expand(count - len(rows), -1)])


class _Joint:
    """One product for several layers that a model calls one after the other with the same input.

    The first call computes all, the others find their part. Any other order or input is right as well, and wasteful.
    What was computed is kept until each part was fetched.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.product = PackedLinear(layers)
        self._widths = [layer.out_features for layer in layers]
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
        self._index = index
        if index == 0:
            self.product = joint.product

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._joint.part(self._index, rows)
