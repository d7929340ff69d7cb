"""What must hold of rounded weights on a device: layers that keep their bytes compute the rounded model, and no other.

Products are compared with the same numbers multiplied in float64 on the CPU; a small model in bfloat16 with the same
rounded model in float32 there, whose weights are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from specserve.bench.gpu_checks import BLOCK_TOKENS, row
from specserve.bench.report import Row
from specserve.models import _float8, _rounded_layers
from specserve.models._float8 import Float8Product
from specserve.models._int8_digits import Int8Digits
from specserve.models._rounded_layers import Quantization
from specserve.models._stretches import Stretch, ragged
from specserve.models.paged_transformers import PagedTransformers

QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "fp8")

MadeRounded = Callable[[torch.device, torch.dtype, Quantization], PagedTransformers]
"""Makes a model with the same rounded weights on any device."""

_CPU = torch.device("cpu")
_INPUTS, _OUTPUTS = 512, 1024
_ROWS = (1, 2, 5, 16, 17, 64, 600)
_POSITIONS = 96
_LOST = 2.0**-7
"""Of the largest result: twice what rounding it to bfloat16 loses, and the order of additions."""
_APART = {"int8": 0.05, "fp8": 0.15}
"""Of the mean logit: three times what bfloat16 makes of a small int8 model, and twice what it makes of an fp8 one, by
numbers of rows that fall to their other neighbours. Rounding itself does as much; products are compared closely."""


def checks(device: torch.device, made: MadeRounded) -> Iterator[Row]:
    """One row for each fact, with how far it was from holding and whether it holds."""
    for quantization in QUANTIZATIONS:
        kept = _rounded_layers.KINDS[quantization].kept
        where = f"{quantization} products"
        if device.type == "cpu" or kept.serves(torch.bfloat16, device):
            lost = max(lost_in_products(kept, device))
            yield row(f"{where}: largest error, of the largest result", lost, lost < _LOST)
            changed = changed_by_company(kept, device)
            yield row(f"{where}: other rows' numbers that a row of no numbers changes", changed, changed == 0)
        else:
            yield row(f"{where}: not there on this device, so weights are written out", 0, True)
        apart, differing = from_the_rounded_model(device, made, quantization)
        yield row(
            f"{quantization} model: logits from those written out, of the mean logit",
            apart,
            apart < _APART[quantization],
        )
        yield row(f"{quantization} model: clear first choices that differ", differing, differing == 0)


def lost_in_products(kept: type[Int8Digits] | type[Float8Product], device: torch.device) -> Iterator[float]:
    """For each number of rows: the largest error, of the largest result."""
    layer = _layer()
    product = kept([layer]).to(device)
    weights = product.codes.cpu().double() * product.scales.cpu().double().view(-1, 1)
    for count in _ROWS:
        rows = _rows(count)
        read = _float8.written_out(*_float8.rounded(rows), torch.float32) if kept is Float8Product else rows
        expected = read.double() @ weights.T + layer.bias.double()
        found = product(rows.to(device)).cpu().double()
        yield float((found - expected).abs().max() / expected.abs().max())


def changed_by_company(kept: type[Int8Digits] | type[Float8Product], device: torch.device) -> int:
    """How many results of 6 rows change when the third one holds no numbers."""
    product = kept([_layer()]).to(device)
    rows = _rows(6)
    usual = product(rows.to(device)).cpu()
    rows[2] = float("nan")
    found = product(rows.to(device)).cpu()
    others = [0, 1, 3, 4, 5]
    return int((found[others] != usual[others]).sum())


def from_the_rounded_model(device: torch.device, made: MadeRounded, quantization: Quantization) -> tuple[float, int]:
    """Mean difference of logits, in bfloat16 there and in float32 on the CPU, of the mean logit; differing choices.

    A choice counts where it leads by a tenth of the largest logit.
    """
    found = _logits(made(device, torch.bfloat16, quantization))
    expected = _logits(made(_CPU, torch.float32, quantization))
    leads = expected.topk(2).values.diff(dim=-1).abs()[:, 0]
    clear = leads > expected.abs().max() / 10
    differing = (found.argmax(-1) != expected.argmax(-1)) & clear
    return float((found - expected).abs().mean() / expected.abs().mean()), int(differing.sum())


def _logits(model: PagedTransformers) -> torch.Tensor:
    """float32 [positions, V], on the CPU, of a made-up text."""
    blocks = -(-_POSITIONS // BLOCK_TOKENS)
    model.allocate(blocks, BLOCK_TOKENS)
    tokens = np.random.default_rng(0).integers(3, model.vocab_size, _POSITIONS)
    table = np.arange(blocks, dtype=np.int32)
    return model.forward(ragged([Stretch(0, tokens, table, _POSITIONS)])).cpu()


def _layer() -> nn.Linear:
    """A linear layer in bfloat16, the same everywhere, that keeps its weights on the CPU."""
    torch.manual_seed(0)
    return nn.Linear(_INPUTS, _OUTPUTS).requires_grad_(False).to(torch.bfloat16)


def _rows(count: int) -> torch.Tensor:
    """bfloat16 [count, inputs], of sizes that differ by a thousand."""
    generator = torch.Generator().manual_seed(count)
    sizes = torch.logspace(-1.5, 1.5, count)[:, None]
    return (torch.randn(count, _INPUTS, generator=generator) * sizes).to(torch.bfloat16)
