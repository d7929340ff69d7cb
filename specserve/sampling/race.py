"""The Gumbel-max trick with noise per token id, as a race: the token whose exponential clock rings first.

argmax(log dist + G), with G standard Gumbel, is argmax(dist / E) with E = exp(−G) standard exponential (Maddison et
al., "A* sampling", 2014). So no logarithm of the dist is taken, and the noise of most ids need not be either:
E = −log(1 − x) ≥ x for the uniform x of an id, so dist / x bounds its score, and scores are worked out in float64 only
where that bound reaches a score that is known. The pick is exactly the one that all scores would give.

x has 31 bits for the bound and 31 more below them for the score; the bits are integers, the same on every device, and
an id of probability p wins with probability p to within 2⁻⁵² relative.
"""

from __future__ import annotations

import torch

from specserve.sampling.noise import token_words

_BLOCK = 128
"""Ids that are looked at again together."""

_LANES = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Ids whose noise is made at a time; on a CPU few enough to stay in its last cache."""

_RANKED_AMONG = 256
"""Ids of a dist that are ranked by their race."""

_SLACK = 1 + 2.0**-20  # more than all rounding of a float32 bound


def race(dist: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """int64 [m]: the winner of each row of dist [m, V], not negative, under keys int32 [m, 4] of `noise.token_keys`.

    An id of probability 0 never wins; a row without any mass, or with NaN, gives some id.
    """
    count = max(1, _LANES.get(dist.device.type, 1 << 20) // max(1, dist.shape[1]))
    if not len(dist):
        return torch.empty(0, dtype=torch.int64, device=dist.device)
    runner = _Runner(min(count, len(dist)), dist)
    chunks = zip(torch.split(dist, count), torch.split(keys, count), strict=True)
    return torch.cat([runner.winners(rows, row_keys) for rows, row_keys in chunks])


def race_sparse(ids: torch.Tensor, probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """int64 [m]: the winners among ids [m, k] with probabilities [m, k], 0 for unused ones; keys int32 [m, 4]."""
    best = race_scores(ids, probs, keys).argmax(-1, keepdim=True)
    return ids.gather(1, best).squeeze(1).long()


def race_scores(ids: torch.Tensor, probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float64 [m, k]: how ids [m, k] of probabilities [m, k] finish under keys int32 [m, 4]; the largest wins."""
    return _scores(ids, probs, keys[:, None])


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
    return torch.nn.functional.pad(found, (0, count - found.shape[1]), value=-1)


def _scores(ids: torch.Tensor, probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float64: dist / E of single ids. keys int32 [..., 4] broadcast against ids and probs."""
    high = token_words(keys[..., :2], ids.int()).double()
    low = token_words(keys[..., 2:], ids.int()).double()
    x = (high + (low + 0.5) * 2.0**-31) * 2.0**-31
    return probs.double() / -torch.log1p(-x)


class _Runner:
    """Work space for `rows` rows at a time; all tensors are padded to whole blocks."""

    def __init__(self, rows: int, dist: torch.Tensor) -> None:
        self._vocab_size = dist.shape[1]
        self._blocks = -(-self._vocab_size // _BLOCK)
        shape, device = (rows, self._blocks * _BLOCK), dist.device
        self._ids = torch.arange(self._vocab_size, dtype=torch.int32, device=device)
        self._words = torch.empty(rows, self._vocab_size, dtype=torch.int32, device=device)
        self._scratch = torch.empty_like(self._words)
        self._bounds = torch.zeros(shape, dtype=dist.dtype, device=device)

    def winners(self, dist: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """int64 [m] for rows of dist that fit."""
        bounds = self._block_bounds(dist, keys)
        rows = torch.arange(len(dist), device=dist.device)
        # The most promising block of a row gives a score; what cannot reach it is out of the race.
        _, known = self._best(dist, keys, rows, bounds.argmax(-1))
        rows, blocks = (bounds * _SLACK >= known[:, None].to(bounds.dtype)).nonzero(as_tuple=True)
        ids, scores = self._best(dist, keys, rows, blocks)
        top = torch.zeros_like(known).scatter_reduce_(0, rows, scores, "amax")
        winner = torch.full_like(known, self._vocab_size, dtype=torch.int64)
        winner.scatter_reduce_(0, rows, torch.where(scores == top[rows], ids, self._vocab_size), "amin")
        return winner.clamp_(max=self._vocab_size - 1)

    def _block_bounds(self, dist: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[m, blocks]: a bound of all scores in each block."""
        words, scratch = self._words[: len(dist)], self._scratch[: len(dist)]
        bounds = self._bounds[: len(dist)]
        token_words(keys[:, None, :2], self._ids, words, scratch)
        # Half of the finest step: a word of 0 stands for an x that is small, not for 0.
        lanes = bounds[:, : self._vocab_size].copy_(words).add_(2.0**-32)
        torch.div(dist, lanes, out=lanes)
        return bounds.view(len(dist), self._blocks, _BLOCK).amax(-1).mul_(2.0**31)

    def _best(
        self, dist: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best id, the lowest on ties, and its score, of each (row, block); int64 and float64 [c]."""
        ids = blocks[:, None] * _BLOCK + torch.arange(_BLOCK, device=dist.device)
        inside = ids < self._vocab_size
        probs = dist[rows[:, None], ids.clamp(max=self._vocab_size - 1)]
        scores = torch.where(inside, _scores(ids, probs, keys[rows][:, None]), 0)
        best, at = scores.max(-1)
        return ids.gather(1, at[:, None]).squeeze(1), best
