"""Products of int8 weights on a GPU that reads them as they are, by whole numbers and with no loss to speak of.

A row is written as whole numbers of two digits, each of a byte: to the nearest of 64,517 multiples of its largest
number / 32,258, an error that is small beside bfloat16's own. Both digits are rows of one int8 product
(`aten::_int_mm`, cuBLAS's on tensor cores), which adds up in int32 without any rounding. So the model is that of the
rounded weights, as everywhere, and a row's sums are the same bits in any company. For the few rows of a step the second
digit costs nothing: cuBLAS wants more than 16 rows anyway, and reading the weights is what takes the time. Products of
two bytes with the same idea are Ootomo et al., "DGEMM on Integer Matrix Multiplication Unit", 2024.

What else torch has: `aten::_weight_int8pack_mm` on CUDA gives each output of each row threads of its own, without
tensor cores, so that a verification of 5 rows reads the weights 5 times; `aten::_mixed_dtypes_linear` is for Ampere
only; rounding rows to one byte, as is usual with `_int_mm`, would make it another model than on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from specserve.models._int8 import LARGEST, rounded

_BASE = 2 * LARGEST  # so that both digits are in ±127
_WHOLE = LARGEST * _BASE
_SMALLEST = 1e-30  # rows of nothing larger come out as zeros
_AT_ONCE = 1 << 24  # results, for which sums and what is made of them take 200 MB; those of a long prompt would not fit
_FULL = 32  # cuBLAS takes 17 digits of rows and more; tiles are whole
_MOST_INPUTS = (2**31 - 1) // LARGEST**2  # of which no sum leaves int32
_CAPABILITY = (7, 5)


class Int8Digits(nn.Module):
    """Linear layers with one input, side by side. rows [..., inputs] → [..., all outputs], in the rows' dtype.

    Buffers: codes int8 [outputs, inputs], scales float32 [outputs], bias float32 [outputs] or None.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        parts = [rounded(layer.weight) for layer in layers]
        biases = [layer.bias.detach().float() for layer in layers if layer.bias is not None]
        self.codes: torch.Tensor
        self.scales: torch.Tensor
        self.bias: torch.Tensor | None
        self.register_buffer("codes", torch.cat([codes.to(torch.int8) for codes, _ in parts]), persistent=False)
        self.register_buffer("scales", torch.cat([scales for _, scales in parts]), persistent=False)
        self.register_buffer("bias", torch.cat(biases) if biases else None, persistent=False)

    @staticmethod
    def serves(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the device multiplies bytes, and the dtype is one that two digits hold."""
        if dtype not in (torch.bfloat16, torch.float16) or device.type != "cuda" or torch.version.cuda is None:
            return False
        return torch.cuda.get_device_capability(device) >= _CAPABILITY

    @staticmethod
    def fits(inputs: int, outputs: int) -> bool:
        """Whether a product of these sizes can be computed: cuBLAS wants whole words, and int32 must hold the sums."""
        return inputs % 16 == 0 and outputs % 16 == 0 and 0 < inputs <= _MOST_INPUTS and outputs > 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        most = max(_FULL // 2, _AT_ONCE // len(self.scales))
        if len(flat) <= most:
            result = self._product(flat)
        else:
            result = torch.cat([self._product(flat[at : at + most]) for at in range(0, len(flat), most)])
        return result.view(*rows.shape[:-1], len(self.scales))

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, inputs] → [n, outputs]."""
        count = len(rows)
        largest = torch.linalg.vector_norm(rows, math.inf, dim=-1, keepdim=True, dtype=torch.float32)
        largest = largest.clamp_min(_SMALLEST)
        low = (rows / largest).mul_(_WHOLE).round_()
        high = (low / _BASE).round_()
        low.sub_(high, alpha=_BASE)
        # What is behind the digits is whatever was there, and so is what comes of it, which nobody reads.
        digits = rows.new_empty(-(-max(2 * count, 1) // _FULL) * _FULL, rows.shape[1], dtype=torch.int8)
        digits[:count], digits[count : 2 * count] = high, low
        sums = torch._int_mm(digits, self.codes.t())
        result = sums[count : 2 * count].float().add_(sums[:count], alpha=_BASE)
        result.mul_(self.scales).mul_(largest / _WHOLE)  # in this order nothing overflows that the result holds
        return (result if self.bias is None else result.add_(self.bias)).to(rows.dtype)
