"""How sure a draft seems of its tokens: the chance that the target keeps each, by the dist that it was picked from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specserve.sampling import _kernels, host
from specserve.transport.messages import Array


def sureness(logits: torch.Tensor, highest: Sequence[float], heat: Array) -> Array:
    """float32 [m]: of the next tokens, from logits [m, V], the largest of each row, and temperatures float32 [m].

    The likeliest token has its probability. A drawn one is kept as often as both models' dists overlap, whatever it is:
    that is taken to be the root of the largest probability, as in trees, so nothing here says which token was drawn.
    0 where nothing can follow.
    """
    most = np.array(highest, dtype=np.float32)
    sound = np.isfinite(most)
    most[~sound] = np.inf
    drawn = heat > 0
    sums = None if drawn.all() else _kernels.exp_sums(logits, most)
    if sums is None:
        (sums,) = host.read(_exp_sums(logits, most, np.ones_like(heat)))
    found = _inverse(sums)
    if drawn.any():
        rows = host.send(torch.from_numpy(np.flatnonzero(drawn)), logits.device)
        (warm,) = host.read(_exp_sums(logits[rows], most[drawn], heat[drawn]))
        found[drawn] = np.sqrt(_inverse(warm))
    return np.where(sound, np.minimum(found, 1), 0).astype(np.float32)


def _exp_sums(logits: torch.Tensor, most: Array, heat: Array) -> torch.Tensor:
    """[m]: the sums of e^((logit - most) / heat)."""
    below = logits - host.send(torch.from_numpy(most), logits.device)[:, None]
    return (below / host.send(torch.from_numpy(heat), logits.device)[:, None]).exp().sum(-1)


def _inverse(sums: Array) -> Array:
    with np.errstate(all="ignore"):
        found: Array = np.nan_to_num(1 / np.asarray(sums, dtype=np.float64), nan=0.0, posinf=0.0)
    return found
