"""Which outcomes of a verification are worth drafting for: how likely each is, learned from those before.

An outcome is (tokens kept, next token). With a_i the share of drafts kept at chain position i, and r the share of next
tokens that the draft ranks f-th there, outcome (j, f) of a chain of k has probability a_1 … a_j (1 − a_{j+1}) r_f for
j < k, and a_1 … a_k r'_f for j = k. (The fan-out of SSD, Kumar et al. 2026, follows from a power law for r; here r is
measured, and each outcome stands for itself.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from specserve.transport.messages import Array

_FORGET = 0.998
"""Weight of an observation after one more."""

_PRIOR_WEIGHT = 4.0

_RANKED_AFTER = 64
"""Chains that are checked before outcomes are ranked anew, at most; an eighth of those so far while that is less."""


class _Share:
    """How often something happens, with a prior, forgetting slowly."""

    __slots__ = ("_hits", "_total")

    def __init__(self, prior: float) -> None:
        self._hits, self._total = prior * _PRIOR_WEIGHT, _PRIOR_WEIGHT

    def observe(self, hits: int, total: int) -> None:
        """It happened in `hits` of `total` new cases."""
        kept = _FORGET**total
        self._hits = self._hits * kept + hits
        self._total = self._total * kept + total

    @property
    def value(self) -> float:
        return self._hits / self._total


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of a chain, most probable first: so many of its tokens kept, int64 [n], and then a next token of this
    rank in the draft's own dist there, int64 [n]."""

    kept: Array
    ranks: Array
    probabilities: list[float]

    @cached_property
    def in_turn(self) -> list[tuple[int, int]]:
        """Kept and rank of each."""
        return list(zip(self.kept.tolist(), self.ranks.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.probabilities)


class Guess(NamedTuple):
    """A next token that was guessed behind a whole kept chain, or in the place of a refused draft, by its rank."""

    whole_chain: bool
    rank: int
    right: bool


guess = cache(Guess)
"""A `Guess`: there are few different ones, and a round makes many."""


class OutcomeOdds:
    """Acceptance by chain position and the ranks of next tokens, over all requests."""

    def __init__(self, fan_out: int) -> None:
        self._fan_out = fan_out
        self._accept: list[_Share] = []
        # After a whole kept chain the next token is the draft's own first choice about as often as a draft is kept.
        self._corrections = [_Share(0.5 ** (rank + 1)) for rank in range(fan_out)]
        self._bonuses = [_Share(0.7), *(_Share(0.3 * 0.5**rank) for rank in range(1, fan_out + 1))]
        self._known: dict[int, Outcomes] = {}
        self._candidates: dict[int, Array] = {}  # kept and rank of all outcomes, [2, n], by length of chain
        self._expected: dict[int, float] = {}  # tokens kept, by depth
        self._observed = 0  # chains
        self._unranked = 0  # of them, those since outcomes were ranked

    def acceptance(self, position: int) -> float:
        """How often a draft at this chain position, from 0, is kept when those before it were."""
        self._grow(position + 1)
        return self._accept[position].value

    def _grow(self, length: int) -> None:
        while len(self._accept) < length:
            self._accept.append(_Share(self._accept[-1].value if self._accept else 0.7))

    def observe_chains(self, checked: Sequence[tuple[int, int]]) -> None:
        """Chains were checked: so many tokens were offered, and the first so many of them confirmed."""
        reached, confirmed = Counter[int](), Counter[int]()
        self._unranked += len(checked)
        for (offered, kept), times in Counter(checked).items():
            for position in range(min(kept + 1, offered)):
                reached[position] += times
                confirmed[position] += times * (position < kept)
        self._grow(max(reached, default=-1) + 1)
        for position, total in reached.items():
            self._accept[position].observe(confirmed[position], total)

    def observe_guesses(self, guesses: Iterable[Guess]) -> None:
        """Next tokens were guessed."""
        for (whole_chain, rank, right), times in Counter(guesses).items():
            shares = self._bonuses if whole_chain else self._corrections
            shares[rank].observe(times * right, times)

    def renew(self, lengths: Iterable[int]) -> None:
        """Rank outcomes anew if much was observed since: of chains of these lengths now, of others when asked."""
        if self._unranked < min(_RANKED_AFTER, self._observed // 8):
            return
        self._observed += self._unranked
        self._unranked = 0
        self.forget_plans()
        for length in set(lengths):
            self.likeliest(length)

    def forget_plans(self) -> None:
        """What was observed since counts from the next `likeliest` and `expected_kept` on."""
        self._known.clear()
        self._expected.clear()

    def likeliest(self, chain: int) -> Outcomes:
        """All outcomes of a chain of this length within the fan-out."""
        known = self._known.get(chain)
        if known is None:
            known = self._known[chain] = self._outcomes(chain)
        return known

    def _outcomes(self, chain: int) -> Outcomes:
        self._grow(chain)
        corrections = [share.value for share in self._corrections]
        found, reach = list[float](), 1.0
        for share in self._accept[:chain]:
            accept = share.value
            refused = reach * (1 - accept)
            found += [refused * each for each in corrections]
            reach *= accept
        found += [reach * share.value for share in self._bonuses]
        order = sorted(range(len(found)), key=found.__getitem__, reverse=True)
        kept, ranks = self._all(chain)[:, order]
        return Outcomes(kept, ranks, [found[each] for each in order])

    def _all(self, chain: int) -> Array:
        """Kept and rank of every outcome, in the order in which `_outcomes` works out how probable each is."""
        known = self._candidates.get(chain)
        if known is None:
            places = [(kept, rank) for kept in range(chain) for rank in range(len(self._corrections))]
            places += [(chain, rank) for rank in range(len(self._bonuses))]
            known = self._candidates[chain] = np.array(places, dtype=np.int64).T
        return known

    def expected_kept(self, depth: int) -> float:
        """Tokens that a chain of this depth is expected to have confirmed."""
        known = self._expected.get(depth)
        if known is None:
            reaches = accumulate((self.acceptance(position) for position in range(depth)), mul)
            known = self._expected[depth] = sum(reaches)
        return known
