"""Exact output laws of rules, by enumeration.

A rule looks at noise only through thresholds, so the unit interval of each uniform falls into pieces on which the
verdict is constant. The rule is run at both ends of every piece: when the two verdicts agree the piece's width is the
exact probability of the verdict; when they differ the proof fails.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import torch

from specserve.verification import FixedNoise, Judge, RuleNoise
from specserve.verification._draft_rows import DraftRows

_INSET = 1e-14

Breaks = Callable[[int], list[float]]

ChainLaw = tuple[tuple[int, ...], float, dict[tuple[int, int], float]]
"""A drafted chain, its probability, and the law of its verdict (kept, next)."""

Thresholds = Callable[[torch.Tensor, torch.Tensor, tuple[int, ...]], tuple[list[list[float]], list[list[float]]]]
"""From target rows [K + 1, V], draft rows [K, V] and a chain: where accept and choose noise decide, by position."""


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
        DraftRows.whole(draft.expand(count, *draft.shape)),
        torch.tensor(tokens, dtype=torch.int64).expand(count, depth),
        torch.full((count,), depth),
        rule_noise(noise[:, :depth], noise[:, depth:]),
    )
    return torch.stack([kept, following], -1)


def rule_noise(accept: torch.Tensor, choose: torch.Tensor, keys: torch.Tensor | None = None) -> RuleNoise:
    """Noise of uniforms; for rules that do not look at noise per token id, its keys are all zero."""
    return FixedNoise(accept, choose, torch.zeros(*choose.shape, 4, dtype=torch.int32) if keys is None else keys)


def cumulative(weights: torch.Tensor) -> list[float]:
    """Where an inverse CDF of these weights goes from one id to the next."""
    total = weights.sum()
    return (weights.cumsum(0) / total).tolist() if total > 0 else []


def rejection_thresholds(rows: torch.Tensor, drafts: torch.Tensor, chain: tuple[int, ...]):
    """Of `rejection`: ratios, and the CDFs of target and residual."""
    accept = [[float(rows[j][t] / drafts[j][t])] if drafts[j][t] > 0 else [] for j, t in enumerate(chain)]
    choose = [cumulative(row) for row in rows]
    for j in range(len(chain)):
        choose[j] = choose[j] + cumulative((rows[j] - drafts[j]).clamp(min=0))
    return accept, choose


def block_thresholds(rows: torch.Tensor, drafts: torch.Tensor, chain: tuple[int, ...]):
    """Of `block`, by its formulas over whole dists: pass probabilities, CDFs of target and weighted residuals."""
    weights = [1.0]
    for j, t in enumerate(chain):
        ratio = float(rows[j][t] / drafts[j][t]) if drafts[j][t] > 0 else 0.0
        weights.append(min(1.0, weights[-1] * ratio))
    residuals = [(weights[j] * rows[j] - drafts[j]).clamp(min=0) for j in range(len(chain))]
    passes = []
    for j in range(1, len(chain)):
        left = float(residuals[j].sum())
        passes.append([left / (left + 1 - weights[j])] if weights[j] < 1 else [])
    choose = [cumulative(row) for row in rows]
    for j, residual in enumerate(residuals):
        choose[j] = choose[j] + cumulative(residual)
    return [*passes, [weights[-1]]], choose


def chosen_thresholds(rows: torch.Tensor, _drafts: torch.Tensor, chain: tuple[int, ...]):
    """Of `exact`: the CDFs of the target."""
    return [[] for _ in chain], [cumulative(row) for row in rows]


def chain_laws(judge: Judge, thresholds: Thresholds, target: Tree, draft: Tree, shipped: Tree, depth: int):
    """The laws of all chains drawn from `draft` and judged against `shipped` dists."""
    for chain in product(range(target.vocab), repeat=depth):
        probability = draft.probability(chain)
        if probability > 0:
            yield chain, probability, chain_law(judge, thresholds, target, shipped, chain)


def chain_law(judge: Judge, thresholds: Thresholds, target: Tree, shipped: Tree, chain: tuple[int, ...]):
    """The law of the verdict on one chain."""
    rows, drafts = target.along(chain, len(chain) + 1), shipped.along(chain, len(chain))
    accept, choose = thresholds(rows, drafts, chain)
    return verdict_law(judge, rows, drafts, list(chain), accept=accept.__getitem__, choose=choose.__getitem__)


def mean_kept(laws: list[ChainLaw]) -> float:
    """Drafted tokens that are kept in expectation."""
    return sum(probability * mass * kept for _, probability, law in laws for (kept, _), mass in law.items())


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

    @classmethod
    def of(cls, rows: dict[tuple[int, ...], list[float] | torch.Tensor]) -> Tree:
        """The model with these dists."""
        tree = object.__new__(cls)
        tree._rows = {prefix: torch.as_tensor(row, dtype=torch.float64) for prefix, row in rows.items()}
        tree.vocab = len(next(iter(tree._rows.values())))
        return tree

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        """Where it has a dist."""
        return list(self._rows)

    def dist(self, prefix: tuple[int, ...]) -> torch.Tensor:
        """The dist of the token after a prefix."""
        return self._rows[prefix]

    def along(self, tokens: tuple[int, ...], count: int) -> torch.Tensor:
        """[count, V]: the dists after the first 0, 1, … tokens."""
        return torch.stack([self._rows[tokens[:j]] for j in range(count)]) if count else self._rows[()][None][:0]

    def probability(self, tokens: tuple[int, ...], start: int = 0) -> float:
        """The probability of tokens[start:] after tokens[:start]."""
        result = 1.0
        for j in range(start, len(tokens)):
            result *= float(self._rows[tokens[:j]][tokens[j]])
        return result


def law_error(target: Tree, depth: int, chain_laws: list[ChainLaw]) -> float:
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
