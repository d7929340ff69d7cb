"""The output law of every rule for chains, exactly."""

from itertools import pairwise, product

import pytest
import torch
from rule_proofs import (
    Tree,
    block_thresholds,
    chain_law,
    chain_laws,
    chosen_thresholds,
    law_error,
    mean_kept,
    rejection_thresholds,
    verdict_law,
)

from specserve.config import EngineConfig
from specserve.sampling.dists import draw, process
from specserve.verification import all_rules, block, exact, rejection

RATIO_RULES = {"rejection": (rejection.judge, rejection_thresholds), "block": (block.judge, block_thresholds)}
SHAPES = [(3, 1), (4, 1), (5, 1), (3, 2), (4, 2)]
EXACT = 1e-12

ratio_rules = pytest.mark.parametrize("rule", RATIO_RULES)


def trees(seed: int, vocab: int, depth: int) -> tuple[Tree, Tree]:
    generator = torch.Generator().manual_seed(seed)
    return Tree(vocab, depth, generator, seed % 2 == 0), Tree(vocab, depth, generator, seed % 3 == 0)


def laws_of(rule: str, target: Tree, draft: Tree, depth: int, shipped: Tree | None = None):
    return list(chain_laws(*RATIO_RULES[rule], target, draft, draft if shipped is None else shipped, depth))


def processed(tree: Tree, top_p: float, top_k: int, temperature: float) -> Tree:
    """The tree that a request's settings make of a model's dists."""
    logits = torch.stack([tree.dist(prefix) for prefix in tree.prefixes]).log()
    n = len(logits)
    dists = process(logits, torch.full((n,), temperature), torch.full((n,), top_p), torch.full((n,), top_k), tree.vocab)
    return Tree.of(dict(zip(tree.prefixes, dists, strict=True)))


@ratio_rules
@pytest.mark.parametrize("part", range(5))
def test_ratio_rules_put_out_the_targets_law(rule: str, part: int) -> None:
    """Whatever the draft, 60 random pairs in each part, what comes out has exactly the target's joint law."""
    for seed in range(part, 300, 5):
        vocab, depth = SHAPES[part]
        target, draft = trees(seed, vocab, depth)
        assert law_error(target, depth, laws_of(rule, target, draft, depth)) < EXACT


@ratio_rules
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 40))])
def test_ratio_rules_are_exact_three_tokens_deep(rule: str, seed: int) -> None:
    """The law holds for chains of three drafted tokens."""
    target, draft = trees(seed, 3, 3)
    assert law_error(target, 3, laws_of(rule, target, draft, 3)) < EXACT


@ratio_rules
@pytest.mark.parametrize(("top_p", "top_k", "temperature"), [(0.7, 0, 1.0), (1.0, 2, 0.7), (0.6, 3, 1.5)])
def test_ratio_rules_are_exact_under_filters(rule: str, top_p: float, top_k: int, temperature: float) -> None:
    """The law is that of the filtered target when both models are filtered with the request's settings."""
    for seed in range(8):
        target, draft = (processed(tree, top_p, top_k, temperature) for tree in trees(seed, 4, 2))
        assert law_error(target, 2, laws_of(rule, target, draft, 2)) < EXACT


def test_block_never_keeps_fewer_than_rejection() -> None:
    """Of 100 pairs `block` keeps at least as many tokens in expectation on each, and more on most at depth 2."""
    more = []
    for seed in range(100):
        vocab, depth = SHAPES[seed % len(SHAPES)]
        target, draft = trees(seed, vocab, depth)
        kept = {rule: mean_kept(laws_of(rule, target, draft, depth)) for rule in RATIO_RULES}
        assert kept["block"] > kept["rejection"] - EXACT
        if depth > 1:
            more.append(kept["block"] > kept["rejection"] + 1e-6)
    assert sum(more) > 0.7 * len(more)


def test_the_published_example_of_block_verification() -> None:
    """Target [.6 .3 .1] and draft [.5 .4 .1] at every step, depth 2: 1.71 tokens are kept by ratio, 1.74 by block."""
    prefixes = [prefix for length in range(3) for prefix in product(range(3), repeat=length)]
    target, draft = (Tree.of(dict.fromkeys(prefixes, row)) for row in ([0.6, 0.3, 0.1], [0.5, 0.4, 0.1]))
    assert mean_kept(laws_of("rejection", target, draft, 2)) == pytest.approx(1.71, abs=1e-12)
    assert mean_kept(laws_of("block", target, draft, 2)) == pytest.approx(1.74, abs=1e-12)


@pytest.mark.parametrize(("vocab", "depth"), [(3, 1), (4, 2), (3, 3)])
def test_exact_puts_out_the_targets_law_for_any_chain(vocab: int, depth: int) -> None:
    """Under `exact` the output law is the target's for every single drafted chain, so for any way of drafting."""
    for seed in range(4):
        target, _ = trees(seed, vocab, depth)
        for chain in product(range(vocab), repeat=depth):
            law = chain_law(exact.judge, chosen_thresholds, target, target, chain)
            assert law_error(target, depth, [(chain, 1.0, law)]) < EXACT


@ratio_rules
def test_a_certain_draft_is_exact_under_ratio_rules(rule: str) -> None:
    """A token chosen without chance, with a one-hot draft dist, keeps ratio rules lossless."""
    judge, thresholds = RATIO_RULES[rule]
    for seed in range(6):
        target, _ = trees(seed, 4, 2)
        for chain in product(range(4), repeat=2):
            draft = torch.nn.functional.one_hot(torch.tensor(chain), 4).double()
            certain = Tree.of({chain[:j]: draft[j] for j in range(2)})
            law = chain_law(judge, thresholds, target, certain, chain)
            assert law_error(target, 2, [(chain, 1.0, law)]) < EXACT


# ---- broken variants, which the same proofs catch ---------------------------------------------------------------


@ratio_rules
def test_a_draft_that_ships_other_dists_than_it_drew_from_is_caught(rule: str) -> None:
    """Shipping unfiltered dists of tokens drawn under top-p biases the output, and the proof sees it."""
    for seed in range(1, 9):
        target, draft = trees(seed, 4, 1)
        filtered = processed(draft, 0.6, 0, 1.0)
        assert law_error(target, 1, laws_of(rule, target, filtered, 1, shipped=draft)) > 1e-3


@ratio_rules
def test_unfiltered_draft_rows_give_the_known_wrong_law(rule: str) -> None:
    """Draft [.5 .3 .2] under top-p .75 against target [.4 .6 0]: exact with the filtered row, [.5 .5 0] without."""
    target = Tree.of({(): [0.4, 0.6, 0.0]} | {(t,): [1 / 3] * 3 for t in range(3)})
    draft = Tree.of({(): [0.5, 0.3, 0.2]})
    filtered = processed(draft, 0.75, 0, 1.0)
    assert filtered.dist(()).tolist() == pytest.approx([0.625, 0.375, 0.0])
    assert first_token(laws_of(rule, target, filtered, 1), 3) == pytest.approx([0.4, 0.6, 0.0], abs=EXACT)
    wrong = first_token(laws_of(rule, target, filtered, 1, shipped=draft), 3)
    assert wrong == pytest.approx([0.5, 0.5, 0.0], abs=EXACT)


def first_token(laws, vocab: int) -> list[float]:
    """The law of the first token put out."""
    law = [0.0] * vocab
    for chain, probability, verdicts in laws:
        for (kept, following), mass in verdicts.items():
            law[chain[0] if kept else following] += probability * mass
    return law


@ratio_rules
def test_dropping_samples_of_low_confidence_is_caught(rule: str) -> None:
    """Target (.5 .5), draft (.9 .1); where a drawn token 1 is dropped, (.55 .45) comes out instead of (.5 .5)."""
    target = Tree.of({prefix: [0.5, 0.5] for prefix in [(), (0,), (1,)]})
    draft = Tree.of({(): [0.9, 0.1]})
    honest = laws_of(rule, target, draft, 1)
    assert law_error(target, 1, honest) < EXACT
    dropped = [*honest[:1], ((), 0.1, chain_law(*RATIO_RULES[rule], target, draft, ()))]
    assert first_token(dropped, 2) == pytest.approx([0.55, 0.45], abs=EXACT)
    assert law_error(target, 1, dropped) > 1e-2


@ratio_rules
def test_choosing_with_the_noise_of_the_proposal_is_caught(rule: str) -> None:
    """One uniform for drawing a draft token and for replacing it: the law is wrong, and right with two."""
    judge, thresholds = RATIO_RULES[rule]
    errors = []
    for seed in range(1, 7):
        target, draft = trees(seed, 4, 1)
        shared, separate = [], []
        for a, b in pairwise([0.0, *draft.dist(()).cumsum(0).tolist()]):
            if a == b:
                continue
            token = int(draw(draft.dist(())[None], torch.tensor([(a + b) / 2])))
            rows, drafts = target.along((token,), 2), draft.along((token,), 1)
            accept, choose = thresholds(rows, drafts, (token,))
            # Given this draft token, choose noise that is the proposal's is uniform on [a, b) only.
            inside = [[a, b, *(c for c in choose[0] if a < c < b)], choose[1]]
            honest = verdict_law(judge, rows, drafts, [token], accept=accept.__getitem__, choose=choose.__getitem__)
            narrow = narrowed(judge, rows, drafts, token, accept, inside, (a, b))
            separate.append(((token,), b - a, honest))
            shared.append(((token,), b - a, narrow))
        assert law_error(target, 1, separate) < EXACT
        errors.append(law_error(target, 1, shared))
    # Three of these pairs leave one token over, which no noise can get wrong.
    assert sum(error > 1e-2 for error in errors) == 3


def narrowed(judge, rows, drafts, token, accept, choose, span):
    """The law of a verdict whose choose noise 0 is uniform on a span: noise that is squeezed into it."""
    low, high = span

    def squeezed(target, draft, tokens, lengths, noise):
        first = low + (high - low) * noise.choose[:, :1]
        moved = type(noise)(noise.accept, torch.cat([first, noise.choose[:, 1:]], 1), noise.keys)
        return judge(target, draft, tokens, lengths, moved)

    breaks = [[(c - low) / (high - low) for c in choose[0]], choose[1]]
    return verdict_law(squeezed, rows, drafts, [token], accept=accept.__getitem__, choose=breaks.__getitem__)


def test_a_lossy_rule_is_caught() -> None:
    """`typical` does not have the target's law, as its constant says; every other rule is proven lossless here."""
    rules = all_rules()
    assert {name for name, rule in rules.items() if not rule.LOSSLESS} == {"typical", "synthetic"}
    judges = [rules["typical"].build(EngineConfig()), rules["synthetic"].build(EngineConfig(synthetic_acceptance=[1]))]
    target, draft = trees(1, 4, 1)
    for judge in judges:
        laws = [
            ((t,), float(draft.dist(())[t]), chain_law(judge, rejection_thresholds, target, draft, (t,)))
            for t in range(4)
        ]
        assert law_error(target, 1, laws) > 1e-2
