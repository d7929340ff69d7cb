"""Drafted tokens that rules keep, in exact expectation over random pairs of small models: no noise is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from specserve.bench.report import Row
from specserve.verification import FixedNoise, typical
from specserve.verification._draft_rows import DraftRows

Model = dict[tuple[int, ...], torch.Tensor]
"""The dist after each prefix, float64 [V]."""

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Expectation:
    """Drafted tokens that `rejection` and `block` keep on average, for one random pair of models."""

    vocab: int
    depth: int
    rejection: float
    block: float


def expectations(pairs: int = 300) -> Iterator[Expectation]:
    """Exact expectations for random pairs of models, vocabulary 3 to 5, chains of 1 to 3."""
    shapes = ((3, 1), (4, 1), (5, 1), (3, 2), (4, 2), (5, 2), (3, 3))
    for seed in range(pairs):
        vocab, depth = shapes[seed % len(shapes)]
        yield Expectation(vocab, depth, *expected_kept(*_models(vocab, depth, seed), vocab, depth))


def _models(vocab: int, depth: int, seed: int) -> tuple[Model, Model]:
    """Target and draft, each at random."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for length in range(depth + 1) for prefix in product(range(vocab), repeat=length)]
    rows = torch.rand(2, len(prefixes), vocab, generator=generator, dtype=torch.float64) ** 2
    target, draft = rows / rows.sum(-1, keepdim=True)
    return dict(zip(prefixes, target, strict=True)), dict(zip(prefixes, draft, strict=True))


def expected_kept(target: Model, draft: Model, vocab: int, depth: int) -> tuple[float, float]:
    """Expected kept tokens of `rejection` and of `block` (Sun et al., 2024), over all chains that can be drafted."""
    by_token = by_block = 0.0
    for chain in product(range(vocab), repeat=depth):
        if _reach(draft, chain) == 0:
            continue
        probability = passed = weight = 1.0
        passes = []
        for place, token in enumerate(chain):
            ahead, behind = target[chain[:place]], draft[chain[:place]]
            probability *= float(behind[token])
            ratio = float(ahead[token] / behind[token])
            passed *= min(1.0, ratio)
            by_token += _reach(draft, chain) * passed
            weight = min(1.0, weight * ratio)
            passes.append(_passes(weight, target, draft, chain[: place + 1], depth))
        # The longest length that passes is kept.
        refused = 1.0
        for kept in range(depth, 0, -1):
            by_block += probability * kept * passes[kept - 1] * refused
            refused *= 1 - passes[kept - 1]
    return by_token, by_block


def _reach(draft: Model, chain: tuple[int, ...]) -> float:
    result = 1.0
    for place, token in enumerate(chain):
        result *= float(draft[chain[:place]][token])
    return result


def _passes(weight: float, target: Model, draft: Model, head: tuple[int, ...], depth: int) -> float:
    """The chance that `block` lets this head of a chain pass, for itself."""
    if len(head) == depth or weight == 1:
        return weight
    left = float((weight * target[head] - draft[head]).clamp(min=0).sum())
    return left / (left + 1 - weight)


# ---- against temperature ------------------------------------------------------------------------------------------

_VOCAB, _DEPTH = 4, 3

Kept = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From target and draft dists [V]: the probability [V] that each token is drafted, and kept."""


def by_temperature(pairs: int = 40, temperatures: Sequence[float] = TEMPERATURES) -> list[Row]:
    """A row for each temperature: the share of drafted tokens that each rule keeps, over pairs of models alike.

    The draft is the target with noise in its logits; both are sampled at the temperature, as requests are.
    """
    models = [_alike(seed) for seed in range(pairs)]
    rows: list[Row] = []
    for temperature in temperatures:
        tempered = [(_at(target, temperature), _at(draft, temperature)) for target, draft in models]
        shares = [kept_shares(target, draft, _VOCAB, _DEPTH) for target, draft in tempered]
        means = {rule: sum(share[rule] for share in shares) / pairs for rule in shares[0]}
        rows.append({"temperature": temperature} | means)
    return rows


def kept_shares(target: Model, draft: Model, vocab: int, depth: int) -> Mapping[str, float]:
    """By rule, expected kept tokens of a chain, as a share of its length."""
    by_token: dict[str, Kept] = {
        "rejection": torch.minimum,
        "coupled": _won_by_both,
        "exact": _drawn_likeliest,
        "typical": _typical,
    }
    expected = {"block": expected_kept(target, draft, vocab, depth)[1]}
    expected |= {rule: _walk(partial(_of, kept, target, draft), depth, ()) for rule, kept in by_token.items()}
    return {rule: kept / depth for rule, kept in expected.items()}


def _of(kept: Kept, target: Model, draft: Model, prefix: tuple[int, ...]) -> torch.Tensor:
    return kept(target[prefix], draft[prefix])


def _walk(kept: Callable[[tuple[int, ...]], torch.Tensor], depth: int, prefix: tuple[int, ...]) -> float:
    """Expected kept tokens behind a prefix, of a rule that judges a token by the dists at its place alone."""
    if depth == 0:
        return 0.0
    found = 0.0
    for token, chance in enumerate(kept(prefix).tolist()):
        if chance > 0:
            found += chance * (1 + _walk(kept, depth - 1, (*prefix, token)))
    return found


def _won_by_both(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Of `coupled`: i wins both races with 1 / Σ_j max(target_j / target_i, draft_j / draft_i) (Daliri et al.)."""
    found = torch.zeros_like(target)
    both = ((target > 0) & (draft > 0)).nonzero().flatten()
    ratios = torch.maximum(target / target[both, None], draft / draft[both, None])
    found[both] = 1 / ratios.sum(-1)
    return found


def _drawn_likeliest(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Of `exact`: the draft's likeliest token is what the target draws."""
    return torch.zeros_like(target).index_copy_(0, draft.argmax()[None], target[draft.argmax()][None])


def _typical(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Of `typical`: whether the rule as it is served keeps the draft's likeliest token."""
    token, one = draft.argmax().view(1, 1), torch.ones(1, dtype=torch.int64)
    noise = FixedNoise(torch.zeros(1, 1), torch.zeros(1, 2), torch.zeros(1, 2, 4, dtype=torch.int32))
    kept, _ = typical.judge(target.expand(1, 2, -1), DraftRows.certain(token), token, one, noise)
    return torch.zeros_like(target).index_fill_(0, token[0], float(kept))


def _alike(seed: int) -> tuple[Model, Model]:
    """Logits [V] by prefix, of a target and of a draft that is the target with noise."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for length in range(_DEPTH + 1) for prefix in product(range(_VOCAB), repeat=length)]
    target = 2.0 * torch.randn(len(prefixes), _VOCAB, generator=generator, dtype=torch.float64)
    draft = target + 1.5 * torch.randn(len(prefixes), _VOCAB, generator=generator, dtype=torch.float64)
    return dict(zip(prefixes, target, strict=True)), dict(zip(prefixes, draft, strict=True))


def _at(logits: Model, temperature: float) -> Model:
    """The dists of these logits; temperature 0 is one-hot."""
    if temperature == 0:
        return {prefix: torch.nn.functional.one_hot(row.argmax(), len(row)).double() for prefix, row in logits.items()}
    return {prefix: torch.softmax(row / temperature, -1) for prefix, row in logits.items()}
