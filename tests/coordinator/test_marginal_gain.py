"""The admitted slots are the best ones: compared with every other choice, on small batches."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.coordinator.marginal_gain import admit

SHARES = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.78, 0.9, 1.0])


@st.composite
def batches(draw):
    rows, depth = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shares = draw(st.lists(SHARES, min_size=rows * depth, max_size=rows * depth))
    limits = draw(st.lists(st.integers(0, depth), min_size=rows, max_size=rows))
    steps = draw(st.lists(st.floats(0, 2), min_size=rows * depth, max_size=rows * depth))
    curve = np.cumsum([1.0, *steps])  # any cost that rises, convex or not
    return np.cumprod(np.array(shares).reshape(rows, depth), axis=1), np.array(limits), curve


def found_in(survival, limits, seconds, draft_step_s=0.0, delivered=1.0):
    """For chains."""
    levels = np.tile(np.arange(survival.shape[1]), (len(survival), 1))
    step = (lambda tokens: np.full(tokens.shape, draft_step_s)) if draft_step_s else None
    return admit(survival, levels, limits, seconds, step, delivered)


def goodput(depths, survival, curve, draft_step_s, delivered=1.0):
    kept = sum(row[:depth].sum() for row, depth in zip(survival, depths, strict=True))
    slots = np.interp(delivered * sum(depths), np.arange(len(curve)), curve)
    return (len(survival) + delivered * kept) / (slots + max(depths) * draft_step_s)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(batches(), st.sampled_from([0.0, 0.05, 0.4]), st.sampled_from([1.0, 0.5]))
def test_no_other_set_of_slots_makes_more_tokens_per_second(batch, draft_step_s, delivered):
    """Against all ways to give each request a depth: for drafts that are waited for and for those that are not."""
    survival, limits, curve = batch

    found = found_in(
        survival, limits, lambda slots: np.interp(slots, np.arange(len(curve)), curve), draft_step_s, delivered
    )

    every = product(*(range(limit + 1) for limit in limits))
    best = max(goodput(depths, survival, curve, draft_step_s, delivered) for depths in every)
    depths = found.slots.tolist()
    assert found.goodput == pytest.approx(best)
    assert goodput(depths, survival, curve, draft_step_s, delivered) == pytest.approx(best)
    assert all(0 <= depth <= limit for depth, limit in zip(depths, limits, strict=True))


def admitted(survival, limits, cost, draft_step_s=0.0):
    return found_in(np.array(survival), np.array(limits), cost, draft_step_s).slots.tolist()


def test_slots_go_to_the_requests_that_keep_them():
    """Ten slots' worth of wishes, and a verification that is free up to four slots: the four likeliest are admitted."""
    survival = [[0.9, 0.81, 0.73, 0.66, 0.59], [0.2, 0.04, 0.01, 0.0, 0.0]]

    assert admitted(survival, [5, 5], lambda slots: np.maximum(1.0, slots / 4)) == [4, 0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches(), st.floats(1.0, 3.0))
def test_a_steeper_verification_admits_no_more(batch, times):
    """Monotone: where each slot costs more, the number of slots does not rise."""
    survival, limits, curve = batch
    at = np.arange(len(curve))
    steps = np.concatenate([[curve[0]], np.sort(np.diff(curve))])
    convex, steeper = np.cumsum(steps), np.cumsum(np.concatenate([steps[:1], steps[1:] * times]))

    mild = admitted(survival, limits, lambda slots: np.interp(slots, at, convex))
    steep = admitted(survival, limits, lambda slots: np.interp(slots, at, steeper))

    assert sum(steep) <= sum(mild)


def test_drafts_that_are_never_kept_are_not_admitted_where_they_cost_anything():
    """0 is a depth like others."""
    assert admitted([[0.0, 0.0]], [2], lambda slots: 1.0 + 0.01 * slots) == [0]
    assert admitted([[0.3, 0.1]], [2], lambda slots: np.ones(len(slots)), draft_step_s=0.5) == [0]
    assert admitted([[0.3, 0.1]], [2], lambda slots: np.ones(len(slots)), draft_step_s=0.2) == [1]
