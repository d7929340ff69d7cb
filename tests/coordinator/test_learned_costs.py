"""What the depth policy learns from rounds: costs that rise with the size, and acceptance by position and request."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.coordinator.acceptance import Acceptance
from specserve.coordinator.costs import Curve, RoundCosts
from specserve.coordinator.depth import Checked


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.001, 1.0)), min_size=1, max_size=60))
def test_a_curve_never_falls_and_stays_within_what_was_measured(measured):
    """Whatever was measured, in whatever order."""
    curve = Curve()
    for size, seconds in measured:
        curve.observe(size, seconds)

    found = curve.seconds(np.arange(1.0, 600.0))
    times = [seconds for _, seconds in measured]
    assert (np.diff(found) >= -1e-12).all()
    assert min(times) - 1e-9 <= found[0]
    assert found[-1] <= max(times) + 1e-9


def test_a_curve_finds_a_devices_step_among_late_rounds():
    """Flat to 8 positions, then a line; every fourth measurement is late by up to five times: within 5% everywhere."""
    draw = random.Random(5)
    curve = Curve()
    for _ in range(2000):
        size = draw.choice([1, 2, 4, 8, 16, 32, 64, 128])
        true = 0.01 + 1e-4 * max(0, size - 8)
        curve.observe(size, true * (draw.uniform(1, 5) if draw.random() < 0.25 else draw.uniform(0.99, 1.01)))

    for size in (1, 4, 8, 16, 24, 48, 96, 128):
        assert abs(curve.at(size) / (0.01 + 1e-4 * max(0, size - 8)) - 1) < 0.05


def test_a_size_that_was_never_tried_counts_as_cheap_and_an_old_measurement_is_forgotten():
    """Both make the policy try it: beyond the largest size the curve is flat."""
    curve = Curve()
    curve.observe(4, 0.01)
    assert curve.at(100) == 0.01

    curve.observe(100, 0.5)
    assert curve.at(100) == 0.5
    for _ in range(2000):
        curve.observe(4, 0.01)
    assert curve.at(100) == 0.01


def test_a_round_with_drafts_is_never_held_cheaper_than_one_without():
    """Noise that says so is not believed."""
    costs = RoundCosts()
    costs.plain.observe(4, 0.010)
    costs.checked.observe(12, 0.008)

    assert costs.seconds(4, np.array([0.0, 1.0, 8.0])).tolist() == [0.010, 0.010, 0.010]


def test_a_host_that_slows_down_does_not_make_an_older_measurement_look_better():
    """Rounds with drafts cost 1.2 plain ones; all become 1.5 times slower: the ratio, known from before, holds."""
    costs = RoundCosts()
    for curve, size, seconds in [(costs.plain, 4, 0.010), (costs.checked, 12, 0.012)]:
        for _ in range(20):
            costs.observe(curve, size, seconds)
    for _ in range(200):
        costs.observe(costs.checked, 12, 0.018)

    assert 1.1 < costs.checked.at(12) / costs.plain.at(4) < 1.3


def after_noise(seed):
    """What rounds with drafts are held to cost after 600 plain ones, of which a fifth were late."""
    draw = random.Random(seed)
    costs = RoundCosts()
    for _ in range(20):
        costs.observe(costs.checked, 12, 0.012)
    for _ in range(600):
        costs.observe(costs.plain, 4, 0.010 * (draw.uniform(1, 3) if draw.random() < 0.2 else draw.uniform(0.98, 1.02)))
    return costs.checked.at(12)


def test_noise_in_one_kind_of_round_does_not_carry_the_others_away():
    """Within 3% in the median of nine runs, and within 25% in each."""
    found = sorted(after_noise(seed) for seed in range(9))

    assert abs(found[4] / 0.012 - 1) < 0.03
    assert found[0] > 0.009
    assert found[-1] < 0.015


def chains(rows, offered, kept):
    return [Checked(*each, each[1]) for each in zip(rows, offered, kept, strict=True)]


def survival(acceptance, rows):
    return np.cumprod(acceptance.shares(rows)[:, :, 0], axis=1)


def test_acceptance_is_learned_by_position_and_by_request():
    """Two requests, one kept by 0.9, 0.5 and one by 0.2, 0.5 given the one before: both are told apart."""
    draw = random.Random(3)
    acceptance = Acceptance(3)
    rates = {1: (0.9, 0.5, 0.5), 2: (0.2, 0.5, 0.5)}
    for _ in range(1500):
        kept = {}
        for row, shares in rates.items():
            kept[row] = next((j for j, share in enumerate(shares) if draw.random() >= share), 3)
        acceptance.observe(chains([1, 2], [3, 3], [kept[1], kept[2]]), 1)

    good, bad = survival(acceptance, [1, 2])
    assert abs(good[0] - 0.9) < 0.1
    assert abs(bad[0] - 0.2) < 0.1
    assert abs(good[1] - 0.45) < 0.12
    assert (np.diff(survival(acceptance, [1, 2, 7]), axis=1) <= 0).all()


def test_a_position_never_tried_is_judged_by_the_one_before_and_a_new_request_by_all():
    """So that a depth which was never offered is neither ruled out nor taken for granted."""
    acceptance = Acceptance(4)
    for _ in range(300):
        acceptance.observe(chains([1], [1], [1]), 1)

    assert acceptance.of_all().min() > 0.9
    assert survival(acceptance, [99])[0, 0] > 0.9


def test_a_request_that_left_is_forgotten_and_the_others_keep_what_they_showed():
    """Rows move together when the table is cleaned up."""
    acceptance = Acceptance(2)
    for _ in range(100):
        acceptance.observe(chains([5, 6, 7], [2, 2, 2], [0, 2, 0]), 1)
    before = survival(acceptance, [6])
    acceptance.keep_only([6, 8])

    assert np.allclose(survival(acceptance, [6]), before)
    assert survival(acceptance, [5])[0, 0] > 0.2  # judged by all again
