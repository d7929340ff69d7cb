"""What is learned of outcomes: many at once as one by one."""

from __future__ import annotations

import pytest

from specserve.coordinator.outcomes import Guess, OutcomeOdds


def test_acceptance_is_learned_by_position():
    """Positions behind the first refused draft were not looked at, and learn nothing."""
    odds = OutcomeOdds(2)
    for _ in range(300):
        odds.observe_chains([(4, 4), (4, 1), (4, 1), (2, 2)])

    assert odds.acceptance(0) == pytest.approx(1.0, abs=0.01)
    assert odds.acceptance(1) == pytest.approx(0.5, abs=0.01)
    assert odds.acceptance(2) == pytest.approx(1.0, abs=0.01)


def test_ranks_are_learned_by_place():
    """The first rank always right behind refused drafts, the second behind whole chains: these outcomes come first."""
    odds = OutcomeOdds(2)
    for _ in range(400):
        odds.observe_guesses([Guess(False, rank, rank == 0) for rank in range(2)])
        odds.observe_guesses([Guess(True, rank, rank == 1) for rank in range(3)])
        odds.observe_chains([(1, 1), (1, 0)])
    odds.forget_plans()
    likeliest = odds.likeliest(1)

    assert set(zip(likeliest.kept[:2].tolist(), likeliest.ranks[:2].tolist(), strict=True)) == {(0, 0), (1, 1)}
    assert sum(likeliest.probabilities) == pytest.approx(1.0, abs=0.05)


def test_many_at_once_teach_as_much_as_one_by_one():
    """A round's chains in one call, or each in a call of its own."""
    chains = [(4, 4), (4, 2), (3, 0), (1, 1), (4, 2)]
    together, apart = OutcomeOdds(2), OutcomeOdds(2)
    for _ in range(50):
        together.observe_chains(chains)
        for chain in chains:
            apart.observe_chains([chain])

    for position in range(4):
        assert together.acceptance(position) == pytest.approx(apart.acceptance(position), abs=0.01)
