"""The one place where a branch of an n-fold answer becomes noise of its own.

Branch 0 has the request's seed, so that one answer is the same whether others were asked for beside it or not.
"""

from __future__ import annotations

from specserve.types import Request

_WORD = 2**64 - 1


def noise_seed(request: Request) -> int:
    """The seed of this branch's noise: the request's own, or one far from it by splitmix64 (Steele et al., 2014)."""
    if request.branch == 0:
        return request.seed
    mixed = (request.seed + request.branch * 0x9E3779B97F4A7C15) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return mixed ^ (mixed >> 31)
