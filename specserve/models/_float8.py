"""Matrix products of float8 numbers: weights rounded once, rows as they come, each with a scale of its own.

Numbers are float8_e4m3fn (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): 4 significant bits, to ±448.
Scales are powers of two, so that a rounded number written out in bfloat16 or float32 is exactly that number; they bring
the largest of a row to 128 to 256, which only the very small numbers of a row lose by. So the rounded model, whose rows
are rounded too, is the same on all devices: where a device has a product of float8 numbers (`aten::_scaled_mm`) it
reads their bytes, elsewhere the same numbers are multiplied written out. What differs is the order of additions, as
ever, and that such a difference may round a number of the next layer's rows to its other neighbour.

On CPUs torch's `_scaled_mm` computes the same, and takes 3 to 40 times as long as a product of written-out weights (one
and five rows of 1,024 numbers, bfloat16 and float32), so that is not what is used there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

_EXPONENT = 0x7F800000  # of a float32's bits; alone they are the largest power of two that the number holds
_BELOW = 2.0**-7  # of that power: the largest number comes to 128 to 256, and e4m3 ends at 448
_SMALLEST = 2.0**-100  # rows of nothing larger come out as next to nothing, by a scale that is no denormal
_CAPABILITY = (8, 9)


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [..., width] → codes float8_e4m3fn of that shape, and scales float32 [..., 1], powers of two.

    A row that is not finite comes out as one that is not.
    """
    largest = torch.linalg.vector_norm(rows, math.inf, dim=-1, keepdim=True, dtype=torch.float32)
    bits = largest.clamp_min(_SMALLEST).view(torch.int32) & _EXPONENT
    scales = bits.view(torch.float32) * _BELOW
    return (rows / scales).to(torch.float8_e4m3fn), scales


def written_out(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `rounded` gave, as numbers of a dtype."""
    return (codes.float() * scales).to(dtype)


class Float8Rows(nn.Module):
    """A linear layer of rounded numbers, written out. rows [..., inputs] → [..., outputs], in their dtype.

    product: the linear layer that reads the rounded rows, with rounded weights.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.product = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = written_out(*rounded(layer.weight.detach()), layer.weight.dtype)
        self.product.weight = nn.Parameter(weight, requires_grad=False)
        self.product.bias = layer.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.product(written_out(*rounded(rows), rows.dtype))
        return result


class Float8Product(nn.Module):
    """Linear layers with one input, side by side. rows [..., inputs] → [..., all outputs], in the rows' dtype.

    Buffers: codes float8_e4m3fn [outputs, inputs], scales float32 [1, outputs], bias [outputs] or None.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        parts = [rounded(layer.weight.detach()) for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.codes: torch.Tensor
        self.scales: torch.Tensor
        self.bias: torch.Tensor | None
        self.register_buffer("codes", torch.cat([codes for codes, _ in parts]), persistent=False)
        self.register_buffer("scales", torch.cat([scales for _, scales in parts]).view(1, -1), persistent=False)
        self.register_buffer("bias", torch.cat(biases) if biases else None, persistent=False)

    @staticmethod
    def serves(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the device multiplies float8 numbers with a scale for each row; all that do can write bfloat16."""
        if dtype != torch.bfloat16 or device.type != "cuda" or torch.version.cuda is None:
            return False
        return torch.cuda.get_device_capability(device) >= _CAPABILITY

    @staticmethod
    def fits(inputs: int, outputs: int) -> bool:
        """Whether a product of these sizes can be computed: cuBLAS and CUTLASS want multiples of 16."""
        return inputs % 16 == 0 and outputs % 16 == 0 and inputs > 0 and outputs > 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        shape = (*rows.shape[:-1], self.scales.shape[1])
        if not rows.numel():
            return rows.new_empty(shape)
        codes, scales = rounded(rows.reshape(-1, rows.shape[-1]))
        result = torch._scaled_mm(
            codes, self.codes.t(), scale_a=scales, scale_b=self.scales, bias=self.bias, out_dtype=rows.dtype
        )
        return result.view(shape)
