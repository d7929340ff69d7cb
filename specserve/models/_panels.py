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
from specserve.models._large_pages import Arena

_PHASE_ROOM = 512
_SMALL = 1 << 17  # multiplications that are done before a second thread has woken up

_arena = Arena()


class Product(ctypes.Structure):
    """`product` of native/products.h: one layer."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
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
        self._kept = [tensor for layer in layers for tensor in self._packed(layer)]
        weights, biases = self._kept[::2], self._kept[1::2]
        self.parts = (Product * len(layers))(
            *[
                Product(weight.data_ptr(), bias.data_ptr() or None, layer.in_features, layer.out_features)
                for layer, weight, bias in zip(layers, weights, biases, strict=True)
            ]
        )

    def _packed(self, layer: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's panels, and its bias, empty where it has none."""
        width = self._library.specserve_panel()
        weight = layer.weight.detach().contiguous()
        panels = _arena.floats(-(-layer.out_features // width) * width * layer.in_features)
        self._library.specserve_pack(weight.data_ptr(), *weight.shape, panels.data_ptr())
        return panels, torch.empty(0) if layer.bias is None else layer.bias.detach().contiguous()

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
