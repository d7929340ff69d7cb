"""Weights of matrix products rounded to int8, a scale for each output, by round-to-nearest on max |row| / 127.

The rounded model is a model of its own, and everything is exact with respect to it: on a CPU our C kernels read the
int8 codes and convert them in registers (`_panels`), on a GPU `_int8_digits` multiplies them as they are, and everybody
else computes with the same weights written out in the configured dtype. Embeddings and norms stay as they are; a head
tied to the embedding is rounded, and what is looked up is not.

torch's own product of int8 weights (`aten::_weight_int8pack_mm`) takes at least 4 times as long on float32 rows of a
CPU as oneDNN's of written-out ones, so those are what is kept where our kernels are not.
"""

from __future__ import annotations

import torch
from torch import nn

LARGEST = 127


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [outputs, inputs] → codes of that shape, whole numbers in float32, and scales float32 [outputs]."""
    exact = weight.detach().float()
    scales = (exact.abs().amax(dim=1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)  # a row of zeros stays so
    return (exact / scales[:, None]).round_(), scales


class Int8Linear(nn.Linear):
    """A linear layer whose weights are codes · scales: whole numbers to ±127, times one scale for each output.

    weight is written out, in the layer's dtype; scales are float32 [outputs].
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        codes, self.scales = rounded(layer.weight)
        self.weight = nn.Parameter((codes * self.scales[:, None]).to(layer.weight.dtype), requires_grad=False)
        self.bias = layer.bias

    def codes(self) -> torch.Tensor:
        """int8 [outputs, inputs]. Exact for float32 weights: a rounding moves no quotient to another whole number."""
        return (self.weight.detach() / self.scales[:, None]).round_().to(torch.int8)
