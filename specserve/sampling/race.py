"""The Gumbel-max trick with noise per token id, as a race: the token whose exponential clock rings first.

argmax(log dist + G), with G standard Gumbel, is argmax(dist / E) with E = exp(−G) standard exponential (Maddison et
al., "A* sampling", 2014). So no logarithm of the dist is taken, and the noise of most ids need not be made at all: it
is drawn from the top down, as in that paper, over blocks of 64 consecutive ids. The first clock of a block to ring does
so at M, exponential with rate 64, and is any of the 64 with equal chance: that is drawn first, once per block. The
others ring at M plus a standard exponential of their own, because exponentials have no memory. So the E of all ids are
independent standard exponentials, and dist / M bounds the score of every id of a block: only ids whose bound reaches a
score that is known are worked out. The pick is exactly the one that all scores would give.

M and the clocks are −log(1 − x), in float64, of uniforms x with 56 and 62 bits; these are integers, the same on every
device, and an id of probability p wins with probability p to within rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from specserve.sampling import _kernels, blocks
from specserve.sampling.noise import T, token_words

_BLOCK = 64
"""Ids that share the draw of their first clock. A part of what noise is: another size gives other answers."""

_BLOCK_BITS = 6

_RANKED_AMONG = 256
"""Ids of a dist that are ranked by their race."""

_STRIPES = 16
"""Parts of a row whose most promising blocks yield scores that are known early."""

_SLACK = 1 - 2.0**-18  # more than all rounding of a float32 bound


def race(dist: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """int64 [m]: the winner of each row of dist [m, V], not negative, under keys int32 [m, 4] of `noise.token_keys`.

    Of equal scores the lowest id wins. An id of probability 0 never wins; a row without any mass, or with NaN, gives
    some id.
    """
    found = _kernels.race(dist, keys)
    return _race_in_tensors(dist, keys) if found is None else found


def _race_in_tensors(dist: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    if not len(dist):
        return torch.empty(0, dtype=torch.int64, device=dist.device)
    vocab_size = dist.shape[1]
    if dist.numel() <= _FEW:
        return race_sparse(torch.arange(vocab_size, device=dist.device).expand(dist.shape), dist, keys)
    if vocab_size < _BLOCK:
        dist = pad(dist, (0, _BLOCK - vocab_size))
    highest = blocks.maxima(dist, _BLOCK)
    words = _block_words(keys, highest.shape[1])
    # dist / M is at most dist · factors: −log(1 − x) ≥ x, and half of the finest step is the smallest x.
    factors = (_BLOCK * 2.0**31) / (words[0].to(dist.dtype) + 2.0**-26)
    bounds = highest * factors
    known = _known_scores(dist, keys, bounds, words[1]) * _SLACK
    rows, ids = _contenders(dist, bounds, factors, known)
    scores = _scores(ids, dist[rows, ids], keys[rows])
    best = torch.zeros_like(known).scatter_reduce_(0, rows, scores, "amax")
    winners = torch.full_like(best, vocab_size, dtype=torch.int64)
    winners.scatter_reduce_(0, rows, torch.where(scores == best[rows], ids, vocab_size), "amin")
    return winners.clamp_(max=vocab_size - 1)


_FEW = 16384
"""Ids of all rows, up to which it costs less to work all of them out than to find those that could win."""


def race_sparse(ids: torch.Tensor, probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """int64 [m]: the winners among ids [m, k] with probabilities [m, k], 0 for unused ones; keys int32 [m, 4]."""
    best = race_scores(ids, probs, keys).argmax(-1, keepdim=True)
    return ids.gather(1, best).squeeze(1).long()


def race_scores(ids: torch.Tensor, probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float64 [m, k]: how ids [m, k] of probabilities [m, k] finish under keys int32 [m, 4]; the largest wins."""
    found = _kernels.race_scores(ids, probs, keys)
    return _scores(ids, probs, keys[:, None]) if found is None else found


def race_ranking(dist: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [m, count]: the first ids of each row's race over dist [m, V], of its likeliest ids; −1 where none is left.

    An id beyond the likeliest few hundred is hardly ever among the first ones; which these are decides no draw.
    """
    probs, ids = dist.topk(min(_RANKED_AMONG, dist.shape[1]), -1)
    return first_ids(ids, race_scores(ids, probs, keys), count)


def first_ids(ids: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [m, count]: of ids [m, k] those with the largest scores [m, k], −1 where no other score is above 0."""
    best, at = scores.topk(min(count, scores.shape[1]), -1)
    found = torch.where(best > 0, ids.gather(1, at), -1)
    return pad(found, (0, count - found.shape[1]), value=-1)


def _scores(ids: torch.Tensor, probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float64: dist / E of single ids. keys int32 [..., 4] broadcast against ids and probs."""
    ids = ids.int()
    if ids.is_cpu:  # where rows are few, numpy takes a third of the time
        return probs / torch.from_numpy(_rings(np, ids.numpy(), keys.numpy()))
    return probs / _rings(torch, ids, keys)


def _rings(lib: Any, ids: T, keys: T) -> T:
    """float64: E of single ids, when their clocks ring; of arrays of `lib`, numpy or torch."""
    # A block's own draw has a number below all ids.
    numbers = lib.stack([ids, -1 - (ids >> _BLOCK_BITS)], -1)
    high, low = (token_words(half, numbers) for half in (keys[..., None, :2], keys[..., None, 2:]))
    own_low, first_low = low[..., 0], low[..., 1]
    holds = (first_low ^ ids) & (_BLOCK - 1) == 0
    steps = lib.stack([_real(lib, own_low) * 2.0**-31, _real(lib, first_low >> _BLOCK_BITS) * 2.0**-25], -1)
    clocks = -lib.log1p((steps + high) * -(2.0**-31))
    rings: T = lib.where(holds, 0.0, clocks[..., 0]) + clocks[..., 1] / _BLOCK
    return rings


def _real(lib: Any, words: T) -> T:
    real: T = lib.asarray(words, dtype=lib.float64) + 0.5
    return real


def _block_words(keys: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [m, count] each: the high and low bits that the first clocks of blocks are drawn from."""
    numbers = torch.arange(-1, -1 - count, -1, dtype=torch.int32, device=keys.device)
    return token_words(keys[:, None, :2], numbers), token_words(keys[:, None, 2:], numbers)


def _known_scores(
    dist: torch.Tensor, keys: torch.Tensor, bounds: torch.Tensor, low_words: torch.Tensor
) -> torch.Tensor:
    """float64 [m]: a score that some id of each row has, and few ids can beat.

    Looked at are the blocks of highest bound in each stripe, and in these the likeliest id, which wins where a dist is
    sharp, and the one that rings first, which wins where it is flat.
    """
    whole = dist.shape[1] // _BLOCK
    stripes = min(_STRIPES, whole)
    width = whole // stripes
    at = torch.unflatten(bounds[:, : stripes * width], 1, (stripes, width)).argmax(-1)
    at += torch.arange(0, stripes * width, width, device=at.device)
    probs = torch.unflatten(dist[:, : whole * _BLOCK], 1, (whole, _BLOCK)).take_along_dim(at[..., None], 1)
    lanes = torch.stack([probs.argmax(-1), low_words.gather(1, at) & (_BLOCK - 1)], -1)
    ids = (at[..., None] * _BLOCK + lanes).flatten(1)
    return _scores(ids, probs.gather(2, lanes).flatten(1), keys[:, None]).amax(-1)


def _contenders(
    dist: torch.Tensor, bounds: torch.Tensor, factors: torch.Tensor, known: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and id, int64 [c] each, of everything whose bound exceeds the row's known score."""
    known = known.to(dist.dtype)
    rows, numbers = (bounds > known[:, None]).nonzero(as_tuple=True)
    # The window of a short last block begins in the block before it.
    begins = (numbers * _BLOCK).clamp(max=dist.shape[1] - _BLOCK)
    windows = dist.unfold(1, _BLOCK, 1)[rows, begins]
    passes = windows > (known[rows] / factors[rows, numbers])[:, None]
    at, lanes = passes.nonzero(as_tuple=True)
    ids = begins[at] + lanes
    mine = ids >= numbers[at] * _BLOCK
    return (rows[at], ids) if dist.shape[1] % _BLOCK == 0 else (rows[at][mine], ids[mine])
