"""Draft dists as they are sampled from, stored and shipped: probabilities rounded to float16 before anything else.

What the draft draws from and what the target checks against must be one dist (Leviathan et al., 2023, holds for any
draft dist, provided it is the true one). So truncation and rounding come first, and both sides divide the float16
values by their sum. float16 values below 1 are multiples of 2⁻²⁴: their float64 sum is exact in any order, hence
the same bits on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from specserve.errors import ProtocolError
from specserve.sampling import _kernels, host
from specserve.transport.messages import Array, Dists, Hidden

_ID_BYTES = 4
_PROB_BYTES = 2


@dataclass(frozen=True, slots=True)
class Support:
    """n dists by the ids that have mass: ids int64 [n, k] and probs float32 [n, k], 0 for unused entries."""

    ids: torch.Tensor
    probs: torch.Tensor

    @staticmethod
    def none(device: torch.device) -> Support:
        """No dists."""
        return Support(torch.empty(0, 1, dtype=torch.int64, device=device), torch.empty(0, 1, device=device))

    @staticmethod
    def whole(dist: torch.Tensor) -> Support:
        """Every id of dist [n, V], in the dtype of dist."""
        return Support(torch.arange(dist.shape[1], device=dist.device).expand(dist.shape), dist)

    def dense(self, width: int) -> torch.Tensor:
        """The dists [n, width]."""
        # Unused entries share id 0 with a possible real one, so they are added, not written.
        return self.probs.new_zeros(len(self.ids), width).scatter_add_(1, self.ids, self.probs)


def sparsify(dist: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest entries of each row of dist [m, V], likeliest first: ids int32 [m, k] and probs float16 [m, k].

    Entries whose rounded probability is 0 are unused: id 0, probability 0. k above V pads. Of equals the lower id comes
    first, and is kept; devices other than a CPU take them as they come.
    """
    found = _kernels.sparsify(dist, k)
    return _sparsify_in_tensors(dist, k) if found is None else found


def _sparsify_in_tensors(dist: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = min(k, dist.shape[1])
    probs, ids = dist.topk(width, -1)
    if dist.is_cpu:
        probs, ids = _in_order(dist, probs, ids)
    rounded = probs.half()
    used = torch.where(rounded > 0, ids, 0).int()
    pad = (0, k - width)
    return torch.nn.functional.pad(used, pad), torch.nn.functional.pad(rounded, pad)


def _in_order(dist: torch.Tensor, probs: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest entries [m, w] with the lower ids of equals, in that order; a whole row is sorted where it must be.

    Equals that are kept and others that are not share the last entry's probability.
    """
    ids = ids.sort(-1).values
    probs, order = torch.sort(dist.gather(1, ids), descending=True, stable=True)
    ids = ids.gather(1, order)
    last = probs[:, -1:]
    cut = ((dist == last).sum(-1) > (probs == last).sum(-1)) & (last.half() > 0).squeeze(1)
    for row in cut.nonzero().squeeze(1).tolist():
        ids[row] = torch.sort(dist[row], descending=True, stable=True).indices[: ids.shape[1]]
    return probs, ids


def normalise(rounded: torch.Tensor) -> torch.Tensor:
    """float32 [m, w] from rounded probabilities float16 [m, w]: divided by their exact sum."""
    total = rounded.sum(-1, keepdim=True, dtype=torch.float64).float()
    return rounded.float() / total


def encode_sparse(ids: torch.Tensor, rounded: torch.Tensor) -> Dists:
    """Sparse rows as bytes: int32 ids, then float16 probabilities."""
    count, width = ids.shape
    found, probs = (np.ascontiguousarray(each) for each in host.read(ids.int(), rounded.half()))
    left = found.view("uint8").reshape(count, width * _ID_BYTES)
    right = probs.view("uint8").reshape(count, width * _PROB_BYTES)
    return Dists("sparse", width, np.concatenate([left, right], axis=1))


def encode_dense(rounded: torch.Tensor) -> Dists:
    """Dense rows float16 [n, V] as bytes."""
    count, width = rounded.shape
    rows = np.ascontiguousarray(host.read(rounded.half())[0]).view("uint8").reshape(count, width * _PROB_BYTES)
    return Dists("dense", width, rows)


def decode(dists: Dists, vocab_size: int, device: torch.device) -> Support:
    """The draft dists that were sampled from, on `device`.

    Raises ProtocolError for rows of a wrong size, ids or mass outside the vocabulary, or probabilities that are no
    dist.
    """
    if not dists.rows.size:
        return Support.none(device)
    sparse = dists.form == "sparse"
    expected = dists.width * (_PROB_BYTES + (_ID_BYTES if sparse else 0))
    if dists.rows.ndim != 2 or dists.rows.shape[1] != expected:
        raise ProtocolError(
            f"{dists.form} dists of width {dists.width} need rows of {expected} bytes, found shape {dists.rows.shape}"
        )
    return _decode_sparse(dists, vocab_size, device) if sparse else _decode_dense(dists, vocab_size, device)


def _decode_sparse(dists: Dists, vocab_size: int, device: torch.device) -> Support:
    split = dists.width * _ID_BYTES
    # Copied, since a single row counts as contiguous whatever its stride, which torch then refuses.
    ids = dists.rows[:, :split].copy().view("int32")
    probs = _probabilities(dists.rows[:, split:])
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ProtocolError(f"draft dist with ids from {ids.min()} to {ids.max()}, vocabulary is {vocab_size}")
    return Support(host.send(ids, device).long(), normalise(host.send(probs, device)))


def _decode_dense(dists: Dists, vocab_size: int, device: torch.device) -> Support:
    probs = _probabilities(dists.rows)
    if probs[:, vocab_size:].any():
        raise ProtocolError(f"draft dist with mass at or above id {vocab_size}, the vocabulary's end")
    return Support.whole(normalise(host.send(probs[:, :vocab_size].copy(), device)))


def _probabilities(rows: Array) -> Array:
    """The float16 values of these bytes, each row of them checked to be a dist but for its sum."""
    probs: Array = rows.copy().view("float16")
    # A comparison with NaN is false, so this also refuses NaN.
    if not (probs >= 0).all() or not (probs <= 1).all() or not probs.any(axis=1).all():
        raise ProtocolError("draft dist with a probability outside 0 to 1, or without any mass")
    return probs


_HIDDEN: dict[torch.dtype, Literal["float32", "bfloat16", "float16"]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def encode_hidden(states: torch.Tensor) -> Hidden:
    """Hidden states [m, width] as bytes, bit for bit. Raises ProtocolError for a dtype that does not travel."""
    if states.dtype not in _HIDDEN:
        raise ProtocolError(f"hidden states of type {states.dtype} do not travel")
    rows = host.read(states.contiguous().view(torch.uint8))[0]
    return Hidden(_HIDDEN[states.dtype], rows)


def decode_hidden(hidden: Hidden, width: int) -> torch.Tensor:
    """States [m, width] on the CPU. Raises ProtocolError for rows of another width."""
    dtype: torch.dtype = getattr(torch, hidden.dtype)
    if not len(hidden.rows):
        return torch.empty(0, width, dtype=dtype)
    if hidden.rows.ndim != 2 or hidden.rows.shape[1] != width * dtype.itemsize:
        raise ProtocolError(f"hidden states of shape {hidden.rows.shape} bytes are not {width} {hidden.dtype} wide")
    return torch.from_numpy(hidden.rows.copy()).view(dtype)
