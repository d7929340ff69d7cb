"""Linear layers on a CPU by our own kernels (`native/products.c`): a weight is read once for a few rows as for one.

What torch offers for that is oneDNN's packed form, which nothing but its own operator can read; these panels are read
by single products and by the whole forward in one call (`_native_decoder`) alike. A result's bits depend on its own row
and nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import nn

from specserve import native
from specserve.models._int8 import Int8Linear
from specserve.models._large_pages import Arena

_PHASE_ROOM = 512
_SMALL = 1 << 17  # multiplications that are done before a second thread has woken up

_arena = Arena()


class Product(ctypes.Structure):
    """`product` of native/products.h: one layer."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


@lru_cache(maxsize=1)
def kernels() -> ctypes.CDLL | None:
    """The library with the types of what is called here, None where there is none."""
    library = native.library()
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.specserve_panel.restype = number
        library.specserve_pack.argtypes = (pointer, number, number, pointer)
        library.specserve_pack_int8.argtypes = (pointer, number, number, pointer)
        library.specserve_products.argtypes = (pointer, number, pointer, number, pointer, number, pointer, ctypes.c_int)
    return library


class Panels:
    """Layers with one input, each [outputs, inputs] and packed on its own; biases of all or none.

    parts: the layers, as the kernels read them.
    """

    def __init__(self, layers: Sequence[nn.Linear], library: ctypes.CDLL) -> None:
        self._library = library
        self._inputs = layers[0].in_features
        self._outputs = sum(layer.out_features for layer in layers)
        self._kept: list[torch.Tensor] = []
        self.parts = (Product * len(layers))(*[self._packed(layer) for layer in layers])

    def _packed(self, layer: nn.Linear) -> Product:
        width = self._library.specserve_panel()
        size = -(-layer.out_features // width) * width * layer.in_features
        scales = None
        if isinstance(layer, Int8Linear):
            codes, panels, scales = layer.codes(), _arena.floats(-(-size // 4)), layer.scales
            self._library.specserve_pack_int8(codes.data_ptr(), *codes.shape, panels.data_ptr())
        else:
            weight, panels = layer.weight.detach().contiguous(), _arena.floats(size)
            self._library.specserve_pack(weight.data_ptr(), *weight.shape, panels.data_ptr())
        bias = None if layer.bias is None else layer.bias.detach()
        return Product(self._keep(panels), self._keep(scales), self._keep(bias), layer.in_features, layer.out_features)

    def _keep(self, tensor: torch.Tensor | None) -> int | None:
        """Where C reads a tensor, for as long as these panels are there."""
        if tensor is None:
            return None
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows float32 [n, inputs] → [n, all outputs]. Raises IndexError for others, behind whose end C would read."""
        if rows.dtype != torch.float32 or rows.ndim != 2 or rows.shape[1] != self._inputs or not rows.is_cpu:
            raise IndexError(f"rows must be float32 [n, {self._inputs}] on a CPU, not {rows.dtype} {list(rows.shape)}")
        rows = rows.contiguous()
        count = len(rows)
        results = torch.empty(count, self._outputs)
        room = torch.empty(rows.numel() + _PHASE_ROOM)
        small = rows.numel() * self._outputs < _SMALL
        self._library.specserve_products(
            self.parts,
            len(self.parts),
            rows.data_ptr(),
            count,
            results.data_ptr(),
            self._outputs,
            room.data_ptr(),
            1 if small else torch.get_num_threads(),
        )
        return results
