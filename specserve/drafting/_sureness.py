"""How sure a draft seems of its tokens: the chance that the target keeps each, by the dist that it was picked from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specserve.sampling import _kernels, host
from specserve.transport.messages import Array


def of_greedy(logits: torch.Tensor, highest: Sequence[float]) -> Array:
    """float32 [m]: the probabilities of the likeliest tokens, from logits [m, V] and the largest of each row.

    0 where nothing can follow.
    """
    most = np.array(highest, dtype=np.float32)
    sound = np.isfinite(most)
    most[~sound] = np.inf
    with np.errstate(all="ignore"):
        return np.where(sound, np.minimum(1 / exp_sums(logits, most), 1), 0).astype(np.float32)


def exp_sums(logits: torch.Tensor, most: Array) -> Array:
    """[m]: the sums of e^(logit - most) over logits [m, V], most float32 [m], wherever the logits are."""
    sums = _kernels.exp_sums(logits, most)
    if sums is None:
        (sums,) = host.read((logits - host.send(torch.from_numpy(most), logits.device)[:, None]).exp().sum(-1))
    return np.asarray(sums)


def of_drawn(peaks: Array) -> Array:
    """float32 [m]: of tokens drawn from dists with these largest probabilities [m], whichever they are.

    A drawn token is kept as often as both models' dists overlap: that is taken to be the root of the largest
    probability, as in trees, so nothing here says which token was drawn.
    """
    with np.errstate(invalid="ignore"):
        found: Array = np.nan_to_num(np.sqrt(np.clip(peaks, 0, 1))).astype(np.float32)
    return found
