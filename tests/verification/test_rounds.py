"""Ratio rules over several rounds with the noise that the workers use.

One round's law is proven by enumeration with fresh noise. Noise here is keyed by position, so that a later round could
meet noise which an earlier verdict depended on; these tests look at that.
"""

import pytest
import torch
from rule_proofs import rule_noise
from scipy.stats import chisquare

from specserve.sampling.dists import draw
from specserve.sampling.noise import Purpose, uniform
from specserve.verification import block, rejection
from specserve.verification._draft_rows import DraftRows

VOCAB, DEPTH, LENGTH = 3, 3, 5
RULES = {"rejection": rejection.judge, "block": block.judge}


def models() -> tuple[torch.Tensor, torch.Tensor]:
    """First-order Markov target and draft, [V, V] each."""
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.softmax(1.3 * torch.randn(VOCAB, VOCAB, generator=generator).double(), -1) for _ in range(2))


def answers(judge, rows: int, keyed_by_place: bool) -> torch.Tensor:
    """The first LENGTH tokens of answers to seeds 0 … rows - 1, drafted DEPTH deep, int64 [rows, LENGTH]."""
    target, draft = models()
    seeds = torch.arange(rows)[:, None]
    places = torch.arange(DEPTH)
    text = torch.zeros(rows, LENGTH + DEPTH + 1, dtype=torch.int64)
    length, last = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    for _ in range(LENGTH):
        positions = length[:, None] + torch.arange(DEPTH + 1)
        keys = places if keyed_by_place else torch.zeros_like(places)
        propose = uniform(seeds, Purpose.PROPOSE, positions[:, :-1], places=keys)
        chain = [last]
        for j in range(DEPTH):
            chain.append(draw(draft[chain[-1]], propose[:, j]))
        history = torch.stack(chain, 1)
        noise = rule_noise(
            uniform(seeds, Purpose.ACCEPT, positions[:, :-1], places=keys), uniform(seeds, Purpose.CHOOSE, positions)
        )
        depths = torch.full((rows,), DEPTH)
        drafts = DraftRows.whole(draft[history[:, :-1]])
        kept, following = judge(target[history], drafts, history[:, 1:], depths, noise)
        out = torch.where(torch.arange(DEPTH) < kept[:, None], history[:, 1:], 0)
        out = torch.nn.functional.pad(out, (0, 1)).scatter(1, kept[:, None], following[:, None])
        going = length < LENGTH
        at = torch.where(going, length, LENGTH)[:, None] + torch.arange(DEPTH + 1)
        text.scatter_(1, at, torch.where(going[:, None], out, text.gather(1, at)))
        length, last = torch.where(going, length + kept + 1, length), torch.where(going, following, last)
    return text[:, :LENGTH]


def p_value(found: torch.Tensor) -> float:
    """Of all texts of LENGTH tokens together."""
    target, _ = models()
    law = torch.ones(1, dtype=torch.float64)
    last = torch.zeros(1, dtype=torch.int64)
    for _ in range(LENGTH):
        law, last = (law[:, None] * target[last]).flatten(), torch.arange(VOCAB).repeat(len(law))
    cells = (found * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
    counts = torch.bincount(cells, minlength=VOCAB**LENGTH)
    return float(chisquare(counts.numpy(), (law / law.sum() * len(found)).numpy()).pvalue)


@pytest.mark.parametrize("rule", RULES)
def test_several_rounds_have_the_targets_law(rule: str) -> None:
    """40,000 seeded answers of five tokens: their joint law is the target's, beyond the first round too."""
    assert p_value(answers(RULES[rule], 40_000, keyed_by_place=True)) > 1e-3


def test_noise_that_a_verdict_has_looked_at_may_not_be_used_again() -> None:
    """Keyed by position alone, `block` meets noise again that its last verdict depended on, and its law is wrong."""
    assert p_value(answers(block.judge, 40_000, keyed_by_place=False)) < 1e-9
