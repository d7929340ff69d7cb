"""Exact output laws of rules, by enumeration.

A rule looks at noise only through thresholds, so the unit interval of each uniform falls into pieces on which the
verdict is constant. The rule is run at both ends of every piece: when the two verdicts agree the piece's width is the
exact probability of the verdict; when they differ the proof fails.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import torch

from specserve.verification import Judge, RuleNoise

_INSET = 1e-14

Breaks = Callable[[int], list[float]]


def pieces(breaks: list[float]) -> list[tuple[float, float]]:
    """The intervals between these points of [0, 1], without those too narrow to matter."""
    points = sorted({0.0, 1.0, *(min(max(b, 0.0), 1.0) for b in breaks)})
    return [(a, b) for a, b in pairwise(points) if b - a > 4 * _INSET]


def verdict_law(
    judge: Judge, target: torch.Tensor, draft: torch.Tensor, tokens: list[int], *, accept: Breaks, choose: Breaks
) -> dict[tuple[int, int], float]:
    """P(kept, next) for one drafted chain, all noise integrated out.

    target [K + 1, V] and draft [K, V]; accept(j) and choose(j) name points where the verdict may change.
    """
    depth = len(tokens)
    axes = [pieces(accept(j)) for j in range(depth)] + [pieces(choose(j)) for j in range(depth + 1)]
    cells = list(product(*axes))
    low = torch.tensor([[a + _INSET for a, _ in cell] for cell in cells], dtype=torch.float64)
    high = torch.tensor([[b - _INSET for _, b in cell] for cell in cells], dtype=torch.float64)
    weight = torch.tensor([[b - a for a, b in cell] for cell in cells], dtype=torch.float64).prod(-1)
    verdicts = [_run(judge, target, draft, tokens, noise) for noise in (low, high)]
    assert torch.equal(verdicts[0], verdicts[1]), "the verdict changes inside a piece"
    law: dict[tuple[int, int], float] = {}
    for (kept, following), mass in zip(verdicts[0].tolist(), weight.tolist(), strict=True):
        law[kept, following] = law.get((kept, following), 0.0) + mass
    return law


def _run(
    judge: Judge, target: torch.Tensor, draft: torch.Tensor, tokens: list[int], noise: torch.Tensor
) -> torch.Tensor:
    count, depth = len(noise), len(tokens)
    kept, following = judge(
        target.expand(count, *target.shape),
        draft.expand(count, *draft.shape),
        torch.tensor(tokens, dtype=torch.int64).expand(count, depth),
        torch.full((count,), depth),
        RuleNoise(noise[:, :depth], noise[:, depth:]),
    )
    return torch.stack([kept, following], -1)


class Tree:
    """A random model of a few tokens: dist(prefix) float64 [V] for every prefix up to a length."""

    def __init__(self, vocab: int, depth: int, generator: torch.Generator, sparse: bool) -> None:
        self.vocab = vocab
        self._rows = {}
        for length in range(depth + 1):
            for prefix in product(range(vocab), repeat=length):
                row = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2
                if sparse:
                    row *= torch.rand(vocab, generator=generator) < 0.6
                    row[torch.randint(vocab, (1,), generator=generator)] += 0.1
                self._rows[prefix] = row / row.sum()

    def dist(self, prefix: tuple[int, ...]) -> torch.Tensor:
        """The dist of the token after a prefix."""
        return self._rows[prefix]

    def along(self, tokens: tuple[int, ...], count: int) -> torch.Tensor:
        """[count, V]: the dists after the first 0, 1, … tokens."""
        return torch.stack([self._rows[tokens[:j]] for j in range(count)]) if count else torch.empty(0, self.vocab)

    def probability(self, tokens: tuple[int, ...], start: int = 0) -> float:
        """The probability of tokens[start:] after tokens[:start]."""
        result = 1.0
        for j in range(start, len(tokens)):
            result *= float(self._rows[tokens[:j]][tokens[j]])
        return result


def law_error(
    target: Tree, depth: int, chain_laws: list[tuple[tuple[int, ...], float, dict[tuple[int, int], float]]]
) -> float:
    """The largest error of the joint law of the first depth + 1 tokens put out, against the target's own law.

    chain_laws: drafted chain, its probability, and the law of its verdict. What is put out after a verdict comes from
    the target.
    """
    found = dict.fromkeys(product(range(target.vocab), repeat=depth + 1), 0.0)
    for chain, probability, law in chain_laws:
        for (kept, following), mass in law.items():
            head = (*chain[:kept], following)
            for tail in product(range(target.vocab), repeat=depth + 1 - len(head)):
                found[head + tail] += probability * mass * target.probability(head + tail, len(head))
    return max(abs(mass - target.probability(tokens)) for tokens, mass in found.items())
