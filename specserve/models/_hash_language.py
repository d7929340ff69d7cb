"""A language without weights: the next token's dist is a hash of everything before it, and a draft of known quality.

A context is the 64-bit digest of a whole history (`_digest_pages`). The target's dist has SUPPORT ids that the
context's hash chooses, the likeliest of probability about 1/2, each next one half as likely. In every context, chosen
by another hash of it, the draft is one of these, with `acceptance` a, `runner_up_hit` h and `runners_up` F:

agrees         chance a             its dist is the target's
near, j decoys chance (1−a)·h / F   for each j from 1 to F: j ids that the target holds impossible stand before the
                                    target's own, which keep their order and a share s = 1/32 together
far            chance (1−a)·(1−h)   only ids that the target holds impossible

So at temperature 0, in each context by itself, the draft's likeliest token is the target's with chance a exactly; where
it is not, the target's token is among the draft's ranks 2 … F + 1 with chance h exactly, each of these ranks alike.

At a temperature T above 0 the near dists give the target's ids a share m(T), the mean over j, with m(1) = s and less
below. Under shared noise (`coupled`) the draft's first is then the target's token with chance a + (1−a)·h·m: 0.786 for
0.78 and 0.9 at T = 1. Where it is not, the target's token is among ranks 2 … F + 1 of the draft's noisy order with
chance h·(1 − m) / (1 − h·m), because the target's ids keep the target's own noisy order and only decoys stand before
them. `expected` computes both. Under `rejection` the two dists overlap by the same number, so acceptance is the same;
but what replaces a refused token is fresh chance, which no draft foresees: it is among ranks 2 … F + 1 of the draft's
dist with about h times the mass of the target's F + 1 − j likeliest ids, j's mean (0.71 of h for F = 3 at T = 1). Under
`exact` the draft's likeliest meets a token that was sampled: a times the target's largest probability.

Ids outside the support have e⁻⁸⁰. Below T = 0.3 the share s is lost in the float16 of shipped dists, and a top-p cuts
it off; then runners-up are never hit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]

SUPPORT = 16
FLOOR = -80.0
"""Log-probability of impossible ids: finite, so that grammars and biases may still choose among them."""

# Made once: in a step of few rows, making them would take as long as using them.
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ELEVEN, _HALF_WORD = np.uint64(11), np.uint64(32)

_DECAY = 0.5
_SHARE = 1 / 32
_WIDTH = 2 * SUPPORT  # the target's ids, then the decoys


def mix(words: Words) -> Words:
    """A permutation of 64-bit words with full avalanche (SplitMix64's finaliser; Steele et al., OOPSLA 2014)."""
    words = words + _WEYL
    words ^= words >> _SHIFTS[0]
    words *= _FACTORS[0]
    words ^= words >> _SHIFTS[1]
    words *= _FACTORS[1]
    words ^= words >> _SHIFTS[2]
    return words


def _geometric(count: int) -> Array:
    weights = _DECAY ** np.arange(count)
    shares: Array = weights / weights.sum()
    return shares


def _falling(count: int) -> Array:
    """Nearly equal probabilities, in strictly falling order."""
    weights = 1 + 0.2 * np.arange(count, 0, -1) / count
    shares: Array = weights / weights.sum()
    return shares


@dataclass(frozen=True, slots=True)
class Quality:
    """How good a draft is; see the module."""

    acceptance: float
    runner_up_hit: float
    runners_up: int

    @property
    def chances(self) -> Array:
        """float64 [F + 2]: how often the draft agrees, is near by 1 … F decoys, is far."""
        wrong = 1 - self.acceptance
        near = wrong * self.runner_up_hit / self.runners_up
        return np.array([self.acceptance, *[near] * self.runners_up, wrong * (1 - self.runner_up_hit)])

    @property
    def dists(self) -> Array:
        """float64 [F + 2, 2 · SUPPORT]: the draft's dist of each kind over the target's ids, then the decoys."""
        rows = np.zeros((self.runners_up + 2, _WIDTH))
        rows[0, :SUPPORT] = _geometric(SUPPORT)
        for decoys in range(1, self.runners_up + 1):
            rows[decoys, :SUPPORT] = _SHARE * _geometric(SUPPORT)
            rows[decoys, SUPPORT : SUPPORT + decoys] = (1 - _SHARE) * _falling(decoys)
        rows[-1, SUPPORT:] = _geometric(SUPPORT)
        return rows

    def expected(self, temperature: float) -> tuple[float, float]:
        """Acceptance, and chance of a runner-up where the first is wrong, at temperature 0 or under shared noise.

        Rounding of the draft's dists on the wire is left out. Acceptance is that of `rejection`, too.
        """
        if temperature == 0 or self.acceptance == 1:
            return self.acceptance, self.runner_up_hit
        heated = self.dists[1:-1] ** (1 / temperature)
        shares = heated[:, :SUPPORT].sum(1) / heated.sum(1)
        won = float(self.chances[1:-1] @ shares)
        near = float(self.chances[1:-1].sum())
        return self.acceptance + won, (near - won) / (1 - self.acceptance - won)


class HashLanguage:
    """Dists of target and draft over ids `first` … `first + count − 1`; count is a prime of at least 2 · SUPPORT."""

    def __init__(self, seed: int, quality: Quality, *, first: int, count: int, vocab_size: int) -> None:
        self._seed = mix(np.array([seed % 2**64], dtype=np.uint64))
        self._first, self._vocab_size = first, vocab_size
        self._count, self._strides = np.uint64(count), np.uint64(count - 1)
        with np.errstate(divide="ignore"):
            table = np.maximum(np.log(quality.dists), FLOOR)
        self._table = table.astype(np.float32)
        self._bounds = quality.chances.cumsum()[:-1]
        self._places = np.arange(_WIDTH, dtype=np.uint64)

    def target(self, contexts: Words) -> npt.NDArray[np.float32]:
        """The target's logits [m, vocab_size] in contexts uint64 [m]; log-probabilities, but for the floor."""
        return self._spread(self._hashed(contexts), self._table[0])

    def draft(self, contexts: Words) -> npt.NDArray[np.float32]:
        """The draft's, likewise."""
        hashed = self._hashed(contexts)
        return self._spread(hashed, self._table[self._kinds(hashed)])

    def kinds(self, contexts: Words) -> Array:
        """int64 [m]: what the draft is in each context, an index into `Quality.chances`."""
        return self._kinds(self._hashed(contexts))

    def ids(self, contexts: Words) -> Array:
        """int64 [m, 2 · SUPPORT]: the target's ids, likeliest first, then the decoys; all distinct in a row."""
        return self._ids(self._hashed(contexts))

    def _hashed(self, contexts: Words) -> Words:
        return mix(contexts ^ self._seed)

    def _kinds(self, hashed: Words) -> Array:
        return self._bounds.searchsorted((mix(hashed) >> _ELEVEN) * 2.0**-53, side="right")

    def _ids(self, hashed: Words) -> Array:
        hashed = hashed[:, None]
        strides = (hashed >> _HALF_WORD) % self._strides
        # The count is prime, so that any stride (1 at least) visits every id before it meets one again.
        places = (hashed % self._count + strides * self._places + self._places) % self._count
        return places.view(np.int64) + self._first

    def _spread(self, hashed: Words, values: Array) -> npt.NDArray[np.float32]:
        logits = np.empty((len(hashed), self._vocab_size), dtype=np.float32)
        logits.fill(FLOOR)
        logits[np.arange(len(hashed))[:, None], self._ids(hashed)] = values
        return logits
