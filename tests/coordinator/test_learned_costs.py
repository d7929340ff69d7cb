"""What the depth policy learns from rounds: costs that rise with the size, and acceptance by position and request."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.coordinator.acceptance import Acceptance
from specserve.coordinator.costs import Curve
from specserve.coordinator.depth import Checked
from specserve.coordinator.round_costs import RoundCosts
from specserve.types import Sampling


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.001, 1.0)), min_size=1, max_size=60))
def test_a_curve_never_falls_and_stays_within_what_was_measured(measured):
    """Whatever was measured, in whatever order."""
    curve = Curve()
    for size, seconds in measured:
        curve.observe(size, seconds)

    found = [curve.at(size) for size in range(1, 600)]
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
    for _ in range(5):
        costs.observe(costs.plain, 4, 0.010)
        costs.observe(costs.checked, 12, 0.008)
    found = costs.seconds(4, np.array([0.0, 1.0, 8.0]))
    assert found[0] == pytest.approx(0.010, rel=0.1)
    assert (found >= found[0]).all()


def test_no_round_is_to_grow_far_beyond_all_that_was_measured():
    """Up to twice the positions, at a cost that rises; more than that has none that anybody could pay."""
    costs = RoundCosts()
    for _ in range(2):  # the first one of a size is not believed
        costs.observe(costs.plain, 4, 0.010)
    found = costs.seconds(4, np.arange(9.0))
    assert (np.diff(found[1:5]) > 0).all()
    assert np.isinf(found[5:]).all()


def compared(paces, seed=1, each=24, trial=4):
    """checked(12) as many times plain(4), which is 1.2, after alternating runs of both at these paces, with noise."""
    draw, costs = random.Random(seed), RoundCosts()
    for number, pace in enumerate(paces):
        of_plain = number % each < trial
        true = pace * (0.010 if of_plain else 0.012) * math.exp(draw.gauss(0, 0.04))
        late = draw.uniform(1.1, 2.5) if draw.random() < 0.1 else 1.0
        costs.pass_round(4, 16)
        costs.observe(costs.plain if of_plain else costs.checked, 4 if of_plain else 12, true * late)
    plain, checked = costs.seconds(4, np.array([0.0, 8.0]))
    return checked / plain


def test_a_host_that_changes_its_pace_does_not_change_what_rounds_cost_beside_each_other():
    """Half as fast for 150 rounds, four times; and then for good: within 6% in the median, 15% in each of nine runs."""
    spells = [1.0 if number // 150 % 2 else 2.0 for number in range(1200)]
    found = sorted(compared(spells, seed) for seed in range(9))
    assert found[4] == pytest.approx(1.2, rel=0.06)
    assert found[0] > 1.2 * 0.85
    assert found[-1] < 1.2 * 1.15


def test_a_long_run_of_one_kind_of_round_moves_the_pace_and_not_its_cost():
    """Known to cost 1.2 plain ones; 400 rounds that take 1.5 times as long say little of that, and leave a doubt."""
    costs = RoundCosts()
    for number in range(400):
        costs.pass_round(4, 16)
        of_plain = number % 20 < 4
        costs.observe(costs.plain if of_plain else costs.checked, 4 if of_plain else 12, 0.010 if of_plain else 0.012)
    before = costs.doubt(4, 12)
    for _ in range(400):
        costs.pass_round(4, 16)
        costs.observe(costs.checked, 12, 0.018)
    plain, checked = costs.seconds(4, np.array([0.0, 8.0]))
    assert checked / plain == pytest.approx(1.2, rel=0.05)
    assert costs.doubt(4, 12) > 1.5 * before


def test_first_times_are_hardly_believed():
    """A size whose first round takes three times as long and whose later ones take a tenth more than plain ones."""
    costs = RoundCosts()
    for _ in range(40):
        costs.observe(costs.plain, 4, 0.010)
    costs.observe(costs.checked, 8, 0.030)
    assert costs.seconds(4, np.array([0.0, 4.0]))[1] < 0.0125
    for _ in range(6):
        costs.observe(costs.checked, 8, 0.011)
    assert costs.seconds(4, np.array([0.0, 4.0]))[1] == pytest.approx(0.011, rel=0.06)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_what_took_no_time_that_there_is_says_nothing(seconds):
    """Of a size that is known, of one that is not, and of drafts: costs are what they are without it."""
    costs, other = RoundCosts(), RoundCosts()
    for learning in (costs, other):
        for _ in range(6):
            learning.observe(learning.plain, 4, 0.010)
            if learning is costs:
                learning.observe(learning.plain, 4, seconds)
                learning.observe(learning.checked, 8, seconds)
                learning.observe_draft(3, 4, seconds)
            learning.observe(learning.checked, 12, 0.013)
    sizes = np.arange(9.0)
    assert costs.seconds(4, sizes).tolist() == other.seconds(4, sizes).tolist()
    assert costs.pace == other.pace
    assert costs.drafting(3, 4) is None
    costs.observe_draft(3, 4, 0.006)
    assert costs.drafting(3, 4) == pytest.approx(0.006, rel=0.1)


def chains(rows, offered, kept):
    return [Checked(*each, each[1]) for each in zip(rows, offered, kept, strict=True)]


def knowing(depth, rows, temperature=0.0):
    """Acceptance that met these requests."""
    acceptance = Acceptance(depth)
    acceptance.meet([request(row, temperature) for row in rows])
    return acceptance


def request(row, temperature=0.0):
    return SimpleNamespace(row=row, request=SimpleNamespace(source=None, sampling=Sampling(temperature=temperature)))


def survival(acceptance, rows):
    return np.cumprod(acceptance.shares(rows)[:, :, 0], axis=1)


def test_acceptance_is_learned_by_position_and_by_request():
    """Two requests, one kept by 0.9, 0.5 and one by 0.2, 0.5 given the one before: both are told apart."""
    draw = random.Random(3)
    acceptance = knowing(3, [1, 2, 7])
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


def test_a_position_never_tried_is_judged_by_the_one_before_and_a_new_request_by_those_like_it():
    """So that a depth which was never offered is neither ruled out nor taken for granted."""
    acceptance = knowing(4, [1])
    for _ in range(300):
        acceptance.observe(chains([1], [1], [1]), 1)
    assert acceptance.meet([request(1), request(99)])

    assert acceptance.shares([1]).min() > 0.9
    assert survival(acceptance, [99])[0, 0] > 0.9


def test_greedy_and_sampled_requests_say_nothing_of_each_other():
    """300 rounds of one at temperature 1 that keeps nothing: a greedy one is judged as if none had been seen."""
    acceptance = knowing(2, [1], temperature=1.0)
    for _ in range(300):
        acceptance.observe(chains([1], [2], [0]), 1)
    acceptance.meet([request(2), request(3, 1.0), request(4, 0.3)])

    greedy, sampled, nearly_greedy = acceptance.shares([2, 3, 4])[:, 0, 0]
    assert greedy == nearly_greedy == pytest.approx(0.6)
    assert sampled < 0.05


def test_a_request_that_left_is_forgotten_and_the_others_keep_what_they_showed():
    """Rows move together when the table is cleaned up."""
    acceptance = knowing(2, [5, 6, 7])
    for _ in range(100):
        acceptance.observe(chains([5, 6, 7], [2, 2, 2], [0, 2, 0]), 1)
    before = survival(acceptance, [6])
    assert not acceptance.meet([request(6)])
    assert np.allclose(survival(acceptance, [6]), before)
    assert acceptance.meet([request(6), request(5)])
    assert survival(acceptance, [5])[0, 0] > 0.2  # judged by all again
