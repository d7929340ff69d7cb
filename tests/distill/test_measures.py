"""Acceptance without serving."""

from __future__ import annotations

import random

import pytest
import torch

from specserve.distill.measures import Acceptance


def one_hot(tokens: list[int], vocabulary: int = 5) -> torch.Tensor:
    logits = torch.full((len(tokens), vocabulary), -30.0)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
    return logits


@pytest.mark.parametrize("seed", range(10))
def test_greedy_rounds_are_those_of_speculative_decoding(seed):
    """The same rounds as drafting and checking one chain after the other."""
    chance = random.Random(seed)
    target = [chance.randrange(5) for _ in range(200)]
    draft = [token if chance.random() < 0.7 else (token + 1) % 5 for token in target]
    found = Acceptance(3)
    found.add(one_hot(target), [one_hot(draft)], greedy=True)
    at = rounds = 0
    while at + 3 < 200:
        kept = 0
        while kept < 3 and draft[at + kept] == target[at + kept]:
            kept += 1
        at, rounds = at + kept + 1, rounds + 1
    assert found.tokens_per_round == pytest.approx(at / rounds)
    assert found.offered_at[0] == rounds
    assert sum(found.kept_at) == at - rounds


def test_later_places_of_a_chain_may_draft_otherwise():
    """Each place of a chain is held to what the draft says there at that place; the last given stands for all later."""
    found = Acceptance(3)
    found.add(one_hot([1] * 7), [one_hot([1] * 7), one_hot([1, 2, 1, 1, 1, 1, 1]), one_hot([1] * 7)], greedy=True)
    assert (found.offered_at, found.kept_at) == ([2, 2, 1], [2, 1, 1])
    again = Acceptance(3)
    again.add(one_hot([1] * 7), [one_hot([1] * 7), one_hot([2] * 7)], greedy=True)
    assert (again.offered_at, again.kept_at) == ([2, 2, 0], [2, 0, 0])


def test_overlap_is_the_chance_that_a_sampled_token_is_kept():
    """Σ min(target, draft); answers that were not written greedily do not count as greedy rounds."""
    found = Acceptance(2)
    target, draft = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.2, 0.3, 0.5]]).log()
    found.add(target, [draft], greedy=False)
    assert found.overlap == pytest.approx(0.7)
    assert found.tokens_per_round == 0
    assert "T=1 0.700" in str(found)
