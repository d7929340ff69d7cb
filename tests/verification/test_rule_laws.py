"""The output law of every rule, exactly."""

from itertools import product

import pytest
import torch
from rule_proofs import Tree, law_error, verdict_law

from specserve.sampling.dists import process
from specserve.verification import exact, rejection

SHAPES = [(3, 1), (4, 1), (5, 1), (3, 2), (4, 2)]


def cumulative(weights: torch.Tensor) -> list[float]:
    total = weights.sum()
    return (weights.cumsum(0) / total).tolist() if total > 0 else []


def rejection_laws(target: Tree, draft: Tree, shipped: Tree, depth: int):
    """Chains drawn from `draft` and judged against `shipped` dists."""
    for chain in product(range(target.vocab), repeat=depth):
        probability = draft.probability(chain)
        if probability > 0:
            rows, drafts = target.along(chain, depth + 1), shipped.along(chain, depth)
            ratios = [[float(rows[j][t] / drafts[j][t])] if drafts[j][t] > 0 else [] for j, t in enumerate(chain)]
            choices = [cumulative(rows[j]) for j in range(depth + 1)]
            for j in range(depth):
                choices[j] = choices[j] + cumulative((rows[j] - drafts[j]).clamp(min=0))
            law = verdict_law(
                rejection.judge,
                rows,
                drafts,
                list(chain),
                accept=lambda j, r=ratios: r[j],
                choose=lambda j, c=choices: c[j],
            )
            yield chain, probability, law


def trees(seed: int, vocab: int, depth: int) -> tuple[Tree, Tree]:
    generator = torch.Generator().manual_seed(seed)
    return Tree(vocab, depth, generator, seed % 2 == 0), Tree(vocab, depth, generator, seed % 3 == 0)


def processed(tree: Tree, top_p: float, top_k: int, temperature: float) -> Tree:
    """The tree that a request's settings make of a model's dists."""
    rows = list(tree._rows)
    logits = torch.stack([tree._rows[prefix] for prefix in rows]).log()
    n = len(rows)
    dists = process(logits, torch.full((n,), temperature), torch.full((n,), top_p), torch.full((n,), top_k), tree.vocab)
    result = object.__new__(Tree)
    result.vocab, result._rows = tree.vocab, dict(zip(rows, dists, strict=True))
    return result


@pytest.mark.parametrize("seed", range(200))
def test_rejection_puts_out_the_targets_law(seed: int) -> None:
    """Whatever the draft, tokens put out under `rejection` have exactly the target's joint law."""
    vocab, depth = SHAPES[seed % len(SHAPES)]
    target, draft = trees(seed, vocab, depth)
    assert law_error(target, depth, list(rejection_laws(target, draft, draft, depth))) < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_rejection_is_exact_three_tokens_deep(seed: int) -> None:
    """The law holds for chains of three drafted tokens."""
    target, draft = trees(seed, 3, 3)
    assert law_error(target, 3, list(rejection_laws(target, draft, draft, 3))) < 1e-12


@pytest.mark.parametrize(("top_p", "top_k", "temperature"), [(0.7, 0, 1.0), (1.0, 2, 0.7), (0.6, 3, 1.5)])
@pytest.mark.parametrize("seed", range(8))
def test_rejection_is_exact_under_filters(seed: int, top_p: float, top_k: int, temperature: float) -> None:
    """The law is that of the filtered target when both models are filtered with the request's settings."""
    target, draft = (processed(tree, top_p, top_k, temperature) for tree in trees(seed, 4, 2))
    assert law_error(target, 2, list(rejection_laws(target, draft, draft, 2))) < 1e-12


@pytest.mark.parametrize("seed", range(8))
def test_a_draft_that_ships_other_dists_than_it_drew_from_is_caught(seed: int) -> None:
    """Shipping unfiltered dists of tokens drawn under top-p biases the output, and the proof sees it."""
    target, draft = trees(seed + 1, 4, 1)
    filtered = processed(draft, 0.6, 0, 1.0)
    assert law_error(target, 1, list(rejection_laws(target, filtered, draft, 1))) > 1e-3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("vocab", "depth"), [(3, 1), (4, 2), (3, 3)])
def test_exact_puts_out_the_targets_law_for_any_chain(vocab: int, depth: int, seed: int) -> None:
    """Under `exact` the output law is the target's for every single drafted chain, so for any way of drafting."""
    target, _ = trees(seed, vocab, depth)
    for chain in product(range(vocab), repeat=depth):
        rows = target.along(chain, depth + 1)
        law = verdict_law(
            exact.judge,
            rows,
            torch.empty(depth, 0),
            list(chain),
            accept=lambda _: [],
            choose=lambda j, r=rows: cumulative(r[j]),
        )
        assert law_error(target, depth, [(chain, 1.0, law)]) < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_a_certain_draft_is_exact_under_rejection(seed: int) -> None:
    """A token chosen without chance, with a one-hot draft dist, keeps `rejection` lossless."""
    target, _ = trees(seed, 4, 2)
    for chain in product(range(4), repeat=2):
        draft = torch.nn.functional.one_hot(torch.tensor(chain), 4).double()
        rows = target.along(chain, 3)
        left = [rows[j] * (1 - draft[j]) for j in range(2)] + [torch.zeros(4)]
        law = verdict_law(
            rejection.judge,
            rows,
            draft,
            list(chain),
            accept=lambda j, r=rows, c=chain: [float(r[j][c[j]])],
            choose=lambda j, r=rows, x=left: cumulative(r[j]) + cumulative(x[j]),
        )
        assert law_error(target, 2, [(chain, 1.0, law)]) < 1e-12


def test_unfiltered_draft_rows_give_the_known_wrong_law() -> None:
    """Draft [.5 .3 .2] under top-p .75 against target [.4 .6 0]: exact with the filtered row, [.5 .5 0] without."""
    target, draft = (object.__new__(Tree) for _ in range(2))
    target.vocab = draft.vocab = 3
    target._rows = {(): torch.tensor([0.4, 0.6, 0.0], dtype=torch.float64)} | {
        (t,): torch.ones(3).double() / 3 for t in range(3)
    }
    draft._rows = {(): torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)}
    filtered = processed(draft, 0.75, 0, 1.0)
    assert torch.allclose(filtered._rows[()], torch.tensor([0.625, 0.375, 0.0], dtype=torch.float64))

    def first_token(shipped: Tree) -> list[float]:
        law = [0.0] * 3
        for chain, probability, verdicts in rejection_laws(target, filtered, shipped, 1):
            for (kept, following), mass in verdicts.items():
                law[chain[0] if kept else following] += probability * mass
        return law

    assert first_token(filtered) == pytest.approx([0.4, 0.6, 0.0], abs=1e-12)
    assert first_token(draft) == pytest.approx([0.5, 0.5, 0.0], abs=1e-12)
