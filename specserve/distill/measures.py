"""Acceptance of a draft on held-out answers, without serving: exact for greedy chains, expected for sampled ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Acceptance:
    """Counts over answers. A greedy draft token is kept where both models' likeliest tokens agree.

    On answers that the target wrote greedily, text before a place is what a greedy chain would have seen, so walking
    over the agreements gives exactly the rounds of speculative decoding at temperature 0. At temperature 1 a token
    drawn from the draft is kept with probability Σ min(target, draft) (Leviathan et al. 2023).
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.offered_at = [0] * depth
        self.kept_at = [0] * depth
        self._tokens = self._rounds = 0
        self._overlap, self._places = 0.0, 0

    def add(self, target: torch.Tensor, drafts: Sequence[torch.Tensor], *, greedy: bool) -> None:
        """One answer: logits [n, m] of both models at the same places; greedy: the target wrote it so.

        drafts holds the draft's as the first, second, … token of a chain, the last of them standing for all later ones.
        """
        shared = torch.minimum(torch.softmax(target, -1), torch.softmax(drafts[0], -1)).sum()
        self._overlap, self._places = self._overlap + float(shared), self._places + len(target)
        if greedy:
            best = target.argmax(-1)
            agree = [(best == draft.argmax(-1)).tolist() for draft in drafts]
            self._walk(agree + agree[-1:] * (self.depth - len(agree)))

    @property
    def tokens_per_round(self) -> float:
        """At temperature 0, the target's own token included."""
        return self._tokens / max(1, self._rounds)

    @property
    def overlap(self) -> float:
        """Σ min(target, draft), averaged: the chance that a chain's first token, drawn at temperature 1, is kept."""
        return self._overlap / max(1, self._places)

    @property
    def merit(self) -> float:
        """What students are chosen by: tokens per round where there are greedy answers, else the overlap."""
        return self.tokens_per_round if self._rounds else self.overlap

    def __str__(self) -> str:
        shares = " ".join(f"{k / max(1, n):.3f}" for k, n in zip(self.kept_at, self.offered_at, strict=True))
        return f"{self.tokens_per_round:.3f} tokens per round at T=0, kept by place {shares}; T=1 {self.overlap:.3f}"

    def _walk(self, agree: list[list[bool]]) -> None:
        at = 0
        while at + self.depth < len(agree[0]):
            kept = 0
            while kept < self.depth:
                self.offered_at[kept] += 1
                if not agree[kept][at + kept]:
                    break
                self.kept_at[kept] += 1
                kept += 1
            self._tokens, self._rounds, at = self._tokens + kept + 1, self._rounds + 1, at + kept + 1
