"""Weights of matrix products rounded to int8, a scale for each output, by round-to-nearest on max |row| / 127.

The rounded model is a model of its own, and everything is exact with respect to it: our C kernels read the int8 codes
and convert them in registers (`_panels`), everybody else computes with the same weights written out in the configured
dtype. Embeddings and norms stay as they are; a head tied to the embedding is rounded, and what is looked up is not.

torch's own product of int8 weights (`aten::_weight_int8pack_mm`) takes at least 4 times as long on float32 rows as
oneDNN's of written-out ones, so those are what is kept where our kernels are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specserve.config import ModelConfig
from specserve.errors import ConfigError

LARGEST = 127


class Int8Linear(nn.Linear):
    """A linear layer whose weights are codes · scales: whole numbers to ±127, times one scale for each output.

    weight is written out, in the layer's dtype; scales are float32 [outputs].
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = layer.weight.detach().float()
        largest = weight.abs().amax(dim=1)
        self.scales = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)  # a row of zeros stays so
        codes = (weight / self.scales[:, None]).round_()
        self.weight = nn.Parameter((codes * self.scales[:, None]).to(layer.weight.dtype), requires_grad=False)
        self.bias = layer.bias

    def codes(self) -> torch.Tensor:
        """int8 [outputs, inputs]. Exact for float32 weights: a rounding moves no quotient to another whole number."""
        return (self.weight.detach() / self.scales[:, None]).round_().to(torch.int8)


def round_weights(model: Any) -> None:
    """Replace all linear layers of a model in place. Raises ConfigError where matrices are left that stay unrounded."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
    for path, module in model.named_modules():
        if isinstance(module, Int8Linear | nn.Embedding):
            continue
        left = next((name for name, weight in module.named_parameters(recurse=False) if weight.ndim > 1), None)
        if left is not None:
            raise ConfigError(
                f"quantization int8 rounds linear layers only, and {path}.{left} of {type(model).__name__} is a "
                f"matrix of a {type(module).__name__}; set quantization to none"
            )


def refuse_unfit(config: ModelConfig, *, recurrent: bool, emulated: bool) -> None:
    """Raise ConfigError for a model that cannot have the quantization of its configuration."""
    if config.quantization != "int8":
        return
    if emulated:
        raise ConfigError(f"{config.source} models have no weights; set quantization {config.quantization} to none")
    if recurrent:
        raise ConfigError(
            f"quantization {config.quantization} is not there for models with recurrent layers, such as "
            f"{config.source}; set it to none"
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"quantization {config.quantization} is not there for models held by several processes; set "
            f"tensor_parallel {config.tensor_parallel} to 1, or quantization to none"
        )
