"""Rows over a vocabulary as blocks of consecutive ids: read once for a number per block, then one block in detail."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specserve.sampling import _kernels


def sums(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[m, ⌈V / size⌉]: the sum of each block of rows [m, V], in their dtype; the last block may be short."""
    return _reduced(rows, size, lambda block: block.sum(-1))


def maxima(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[m, ⌈V / size⌉]: the largest value of each block of rows [m, V]; the last block may be short."""
    return _reduced(rows, size, lambda block: block.amax(-1))


def _reduced(rows: torch.Tensor, size: int, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    whole = rows.shape[1] // size
    found = reduce(torch.unflatten(rows[:, : whole * size], 1, (whole, size)))
    tail = rows[:, whole * size :]
    return torch.cat([found, reduce(tail)[:, None]], 1) if tail.shape[1] else found


_FEW = 16384
"""Values in all, up to which seven operators cost more than comparing one value after the other."""


def argmax(rows: torch.Tensor, size: int = 64) -> torch.Tensor:
    """int64 [m]: where the largest value of each row [m, V] is, the lowest place on ties; of NaN, the first one.

    On a CPU it takes a fourth of the time of `torch.argmax`, which compares one value after the other; where these are
    few, that one is faster.
    """
    found = _kernels.argmax(rows)
    if found is not None:
        return found
    if rows.numel() <= _FEW:
        return rows.argmax(-1)
    block = maxima(rows, size).argmax(-1, keepdim=True)
    places = (block * size + torch.arange(size, device=rows.device)).clamp_(max=rows.shape[1] - 1)
    return places.gather(1, rows.gather(1, places).argmax(-1, keepdim=True)).squeeze(1)


def peaks(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [m] and [m]: where the largest value of each row [m, V] is, as `argmax` says, and that value.

    It is not finite where a row holds a NaN or +inf, or nothing but −inf.
    """
    places = argmax(rows)
    return places, rows.gather(1, places[:, None]).squeeze(1)
