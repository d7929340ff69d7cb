"""From logits to a dist, and from a dist to a token.

A dist is a row of probabilities over the model's vocabulary. Ids at and above the shared real vocabulary (padding of
an embedding matrix) have probability 0 always.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from specserve.sampling import _kernels, blocks, host

_CANDIDATES = 1024
"""Ids looked at before a whole row is sorted; nearly every nucleus is smaller."""

_BLOCK = 128
"""Ids whose weights are summed before one of them is looked for."""


def process(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    vocab_size: int,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The dist that each row's request asks for: temperature, then top-k, top-p and min-p, each of what is left.

    logits [m, V]; temperature, top_p and min_p float32 [m] and top_k int64 [m] are on the CPU, so that deciding what
    is to be done waits for no device. The dist is [m, V] in the logits' dtype and on their device. Temperature 0 is a
    one-hot row at the largest logit, the lowest id on ties; top_k 0, top_p 1 and min_p 0 (or None) switch a filter off.
    top-k keeps exactly k ids and top-p the smallest set whose mass reaches top_p; between equals the lower id is kept.
    min-p keeps ids at least min_p times as likely as the likeliest (Nguyen et al., 2024).
    """
    heat = temperature.numpy()
    sampled = heat != 0
    if not sampled.any():
        return one_hot(greedy_choice(logits, vocab_size), logits.shape[1]).to(logits.dtype)
    dist = _softmax(logits, heat, vocab_size)
    # Whether a part of the ids was enough would have to be asked of the device: there, all are sorted.
    candidates = _CANDIDATES if dist.is_cpu else dist.shape[1]
    for here, rows in _rows_where(((top_p.numpy() < 1) | (top_k.numpy() > 0)) & sampled, dist.device):
        dist[rows] = filter_dist(dist[rows], top_p[here], top_k[here], candidates)
    if min_p is not None:
        for here, rows in _rows_where((min_p.numpy() > 0) & sampled, dist.device):
            dist[rows] = _drop_unlikely(dist[rows], host.send(min_p[here], dist.device))
    for _, rows in _rows_where(~sampled, dist.device):
        dist[rows] = one_hot(greedy_choice(logits[rows], vocab_size), dist.shape[1]).to(dist.dtype)
    return dist


def _rows_where(mask: npt.NDArray[np.bool_], device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The indices set in a mask, here and on `device`; an empty list when there are none."""
    if not mask.any():
        return []
    rows = torch.from_numpy(mask.nonzero()[0])
    return [(rows, host.send(rows, device))]


def _softmax(logits: torch.Tensor, heat: npt.NDArray[np.float32], vocab_size: int) -> torch.Tensor:
    found = _kernels.softmax(logits, heat, vocab_size)
    return _softmax_in_tensors(logits, heat, vocab_size) if found is None else found


def _softmax_in_tensors(logits: torch.Tensor, heat: npt.NDArray[np.float32], vocab_size: int) -> torch.Tensor:
    real = logits[:, :vocab_size]
    dist = torch.empty_like(logits)
    if vocab_size < dist.shape[1]:
        dist[:, vocab_size:] = 0
    # The largest logit becomes 0 before the division, so that no temperature, however small, makes an infinity.
    # All in the memory of the result: a fresh tensor of this size costs a CPU more than the work on it.
    part = torch.sub(real, real.amax(-1, keepdim=True), out=dist[:, :vocab_size])
    if not (heat == 1).all():
        part.div_(host.send(torch.from_numpy(np.where(heat == 0, 1, heat)).to(part.dtype), part.device)[:, None])
    torch.softmax(part, -1, out=part)
    return dist


def greedy_choice(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int64 [m]: the id of the largest logit below vocab_size in each row of [m, V], the lowest id on ties."""
    return blocks.argmax(logits[:, :vocab_size])


def one_hot(ids: torch.Tensor, width: int) -> torch.Tensor:
    """float32 [m, width] with all mass on ids int64 [m]."""
    return torch.zeros(ids.shape[0], width, device=ids.device).scatter_(1, ids[:, None], 1.0)


def filter_dist(
    dist: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, candidates: int = _CANDIDATES
) -> torch.Tensor:
    """Keep the top_k likeliest ids of each row, then the smallest set of these with mass top_p, and renormalise.

    dist [m, V]; top_p [m] and top_k [m] on the CPU; 1 and 0 switch a filter off. `candidates` ids are sorted at
    first, and eight times as many for the rows where that was too few: a row's own need decides, for a sum over more
    ids may round to other bits, and company may not matter.
    """
    if candidates >= dist.shape[1]:
        probs, ids = torch.sort(dist, dim=-1, descending=True, stable=True)
        return _keep_front(probs, ids, top_p, top_k, dist)[0]
    filtered, sure = _keep_front(*_likeliest(dist, candidates), top_p, top_k, dist)
    for here, rows in _rows_where(~host.read(sure)[0], dist.device):
        filtered[rows] = filter_dist(dist[rows], top_p[here], top_k[here], 8 * candidates)
    return filtered


def _drop_unlikely(dist: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    floor = dist.amax(-1, keepdim=True) * min_p.to(dist.dtype)[:, None]
    kept = torch.where(dist >= floor, dist, 0)
    return kept / kept.sum(-1, keepdim=True)


def _likeliest(dist: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest probabilities and ids of each row, likeliest first, the lower id first on ties."""
    ids = dist.topk(count, -1).indices.sort(-1).values
    probs, order = torch.sort(dist.gather(1, ids), dim=-1, descending=True, stable=True)
    return probs, ids.gather(1, order)


def _keep_front(
    probs: torch.Tensor, ids: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, dist: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filter rows given their sorted front [m, C]. Also bool [m]: nothing beyond the front could have been kept."""
    top_p = host.send(torch.where(top_p >= 1, torch.inf, top_p).double(), probs.device)[:, None]
    top_k = host.send(torch.where(top_k <= 0, dist.shape[1], top_k), probs.device)[:, None]
    rank = torch.arange(probs.shape[1], device=probs.device)
    mass = torch.where(rank < top_k, probs, 0).double()
    total = torch.where(top_k < dist.shape[1], mass.sum(-1, keepdim=True), 1.0)
    keep = (rank < top_k) & ((mass.cumsum(-1) - mass < top_p * total) | (rank == 0))
    last = probs.gather(1, keep.sum(-1, keepdim=True) - 1).squeeze(1)
    kept = torch.where(keep, probs, 0)
    filtered = torch.zeros_like(dist).scatter_(1, ids, kept / kept.sum(-1, keepdim=True))
    # With a part of the top k only, their mass is not known.
    return filtered, (last > probs[:, -1]) & ((top_k == dist.shape[1]) | (top_k < probs.shape[1])).squeeze(1)


def draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One id per row by inverse CDF: int64 [m] from weights [m, V], not negative, and uniforms [m] in [0, 1).

    Weights need not sum to 1. An id of weight 0 is never returned, whatever the noise and the rounding. A row without
    any weight returns some id.
    """
    return draw_where_possible(weights, noise)[0]


def draw_where_possible(weights: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `draw`; also bool [m]: whether a row has any weight.

    The row is read once, for the weight of each block of ids; then one block of it is looked at in detail. Sums within
    a block are in the weights' dtype, sums over blocks in float64.
    """
    found = _kernels.draw(weights, noise)
    return _draw_in_tensors(weights, noise) if found is None else found


def _draw_in_tensors(weights: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mass = blocks.sums(weights, _BLOCK).double()
    threshold = noise.double()[:, None] * mass.sum(-1, keepdim=True)
    block, before = _first_above(mass, threshold)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=weights.shape[1] - 1))
    inside = torch.where(ids < weights.shape[1], inside, 0).double()
    at, _ = _first_above(inside, threshold - before)
    return ids.gather(1, at).squeeze(1), mass.any(-1)


def _first_above(mass: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running sum of mass float64 [m, n] first exceeds the threshold [m, 1], and the sum before; [m, 1] each.

    A parallel scan is not monotone, so the mass of a place is tested too. Rounding may leave the threshold at the
    total itself, which no place passes; the largest one is surely possible.
    """
    total = mass.cumsum(-1)
    hit = (total > threshold) & (mass > 0)
    first = torch.where(hit, torch.inf, mass).argmax(-1, keepdim=True)
    return first, (total - mass).gather(1, first)
