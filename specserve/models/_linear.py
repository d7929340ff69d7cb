"""Float32 linear layers that cost the same for one row as for a few, on CPUs.

torch's plain product takes up to three times as long for 2 to 8 rows as for one, which is just the size of a
verification. Packed weights do not: our own kernels' (`_panels`) where they can be compiled, else oneDNN's. The packed
form replaces the plain one. A head tied to the embedding is packed too, so its weight is held twice: the embedding
reads rows of it, which the packed form does not show.

Layers that read the same input become one product (`_joint`): at batch 1 a layer of a small model takes less time than
threads need to meet before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import nn

from specserve.errors import ConfigError
from specserve.models import _joint, _panels
from specserve.models._int8 import Int8Linear
from specserve.models._panels import Panels

_USUAL_ROWS = 4  # oneDNN picks the packed layout for this many rows; others run on it as well
_INVARIANT_ROWS = 2  # from here on oneDNN adds in the same order whatever the number of rows


def _cheapest_rows() -> int:
    """Up to this many rows, more of them take no longer: with AVX-512, 4 rows take a seventh less than one."""
    return 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


def speed_up(model: nn.Module) -> None:
    """Replace the linear layers of a float32 model on the CPU in place, where anything here can compute the others."""
    if _panels.kernels() is None and not _has_onednn():
        return
    for parent in list(model.modules()):
        plain = {name: child for name, child in parent.named_children() if _can_be_packed(child)}
        _joint.replace(parent, plain, PackedLinear)


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
    """The packed product of all layers that `first` (such as `q_proj`) shares its input with; None for any other."""
    product = _joint.product_of(first)
    return product if isinstance(product, PackedLinear) else None


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    # Other subclasses may compute something else.
    if type(module) is not nn.Linear and type(module) is not Int8Linear:
        return False
    return module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"


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
