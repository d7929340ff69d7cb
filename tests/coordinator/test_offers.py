"""Which drafted tokens are checked, by how sure their draft is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.coordinator.offers import Sureness, best_end, goodputs, offered, offered_blindly

GREEDY, WARM = (None, 0), (None, 2)
CLIFF = np.array([10.0, 10.2, 10.4, 15, 15.2, 15.4, *np.arange(15.6, 40, 0.2)])  # the third token more is dear


@st.composite
def orders(draw):
    """Worths that fall, a number of requests, and seconds that rise."""
    worths = sorted(draw(st.lists(st.floats(0, 1), min_size=1, max_size=8)), reverse=True)
    rises = draw(st.lists(st.floats(0.001, 2), min_size=len(worths), max_size=len(worths)))
    return np.array(worths), draw(st.integers(1, 8)), np.cumsum([1.0, *rises])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(orders())
def test_no_other_end_makes_more_tokens_per_second(order):
    worths, rows, seconds = order
    goodput = [(rows + worths[:end].sum()) / seconds[end] for end in range(len(worths) + 1)]
    assert goodput[best_end(worths, rows, seconds)] == pytest.approx(max(goodput))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_drawn_token_is_offered_whatever_is_behind_it_and_behind_those_of_others(count, depth, data):
    """Two rounds with the same first tokens: these are offered in both or in none; so it goes on in each chain."""
    cells = st.lists(st.floats(0, 1), min_size=count * depth, max_size=count * depth)
    chances, others = (np.array(data.draw(cells)).reshape(count, depth) for _ in range(2))
    same = data.draw(st.integers(0, count - 1)), data.draw(st.integers(1, depth))
    others[:, 0] = chances[:, 0]
    others[same[0], : same[1]] = chances[same[0], : same[1]]
    rises = data.draw(st.lists(st.floats(0.001, 2), min_size=2 * count, max_size=2 * count))
    seconds = np.cumsum([1.0, *rises])
    one, two = (offered_blindly(np.cumprod(each, axis=1), count, seconds) for each in (chances, others))
    assert [each > 0 for each in one] == [each > 0 for each in two]
    assert min(one[same[0]], same[1]) == min(two[same[0]], same[1])


TARGET = np.array([0.3, 0.5, 0.2])
DRAFT = np.array([0.5, 0.3, 0.2])


def law(counts_of):
    """The law of a request's first answer token, enumerated, beside another one that draws with the same noise.

    Both drafts have two tokens, of which the other's second one is sure behind token 0 only.
    """
    first = DRAFT.max() ** 0.5
    residual = np.maximum(0, TARGET - DRAFT)
    found = np.zeros(3)
    for token, chance in enumerate(DRAFT):
        worths = np.array([[first, first * (0.99 if token == 0 else 0.0)], [first - 0.1, 0.0]])
        if counts_of(worths)[1] == 0:
            found += chance * TARGET
            continue
        kept = min(1.0, TARGET[token] / chance)
        found[token] += chance * kept
        found += chance * (1 - kept) * residual / residual.sum()
    return found


def test_drawn_tokens_keep_the_targets_law_also_beside_a_request_with_the_same_seed():
    """The best of all would take its place where the other draws 0, which is where this one does: so its law breaks."""
    seconds = np.array([1.0, 1.05, 1.1, 2.5, 2.6])
    assert law(lambda worths: offered_blindly(worths, 2, seconds)) == pytest.approx(TARGET)
    alike = law(lambda worths: offered(worths, best_end(-np.sort(-worths, axis=None), 2, seconds)))
    assert abs(alike - TARGET).max() > 0.01


def test_behind_a_first_token_what_pays_is_offered():
    """Cheap rows: all that is likely. Dear ones: nothing, or the first tokens that pay alone."""
    worths = np.array([[0.9, 0.8, 0.1], [0.6, 0.1, 0.0]])
    assert offered_blindly(worths, 2, 1 + 0.1 * np.arange(5)) == [2, 1]
    assert offered_blindly(worths, 2, 1 + 0.4 * np.arange(5)) == [1, 0]
    assert offered_blindly(worths, 2, 1 + 0.8 * np.arange(5)) == [0, 0]
    assert offered_blindly(worths, 2, np.array([1, 1.1, np.inf, np.inf, np.inf])) == [1, 0]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 16), st.data())
def test_the_most_valuable_tokens_are_offered_each_behind_its_chain(count, depth, end, data):
    """Nothing that is left out is worth more than what is offered, and equal ones make no gaps."""
    cells = data.draw(st.lists(st.floats(0, 1), min_size=count * depth, max_size=count * depth))
    drafts = np.cumprod(np.array(cells).reshape(count, depth), axis=1)
    counts = offered(drafts, end)
    assert sum(counts) == min(end, count * depth)
    inside = [worth for draft, taken in zip(drafts, counts, strict=True) for worth in draft[:taken]]
    outside = [worth for draft, taken in zip(drafts, counts, strict=True) for worth in draft[taken:]]
    assert min(inside, default=1.0) >= max(outside, default=0.0)


def test_a_dear_token_is_passed_only_for_more_behind_it():
    """Two tokens fit below the cliff; with many good ones it pays to go beyond it."""
    assert best_end(np.full(3, 0.6), 4, CLIFF[:4]) == 2
    assert best_end(np.full(12, 0.9), 4, CLIFF[:13]) == 12


def test_what_a_draft_says_of_itself_is_set_right():
    """One that is kept half as often as it says is believed half as much; another range, or class, is not touched."""
    sureness = Sureness(2)
    for number in range(400):
        sureness.observe([GREEDY], [[0.9]], [number % 2])
    found = sureness.worths([GREEDY, GREEDY, WARM], [[0.9, 0.3], [0.3], [0.9]])
    assert found[0] == pytest.approx([0.5, 0.5 * 0.3], abs=0.05)
    assert found[1:] == pytest.approx(np.array([[0.3, 0], [0.9, 0]]))


def test_tokens_behind_the_first_refused_one_teach_nothing():
    sureness = Sureness(3)
    for _ in range(100):
        sureness.observe([GREEDY, WARM], [[0.9, 0.4, 0.7], [0.9, 0.4]], [1, 2])  # in the first one 0.4 was refused
    chances = sureness.worths([GREEDY] * 3, [[0.9], [0.4], [0.7]])[:, 0]
    assert chances[0] > 0.9
    assert chances[1] < 0.1
    assert chances[2] == pytest.approx(0.7)


def test_what_is_imagined_is_what_such_drafts_said():
    """Of the class at first, of the request where it has enough of its own; deeper ones lose as much as on average."""
    sureness = Sureness(3)
    assert not sureness.knows(GREEDY)
    for _ in range(4):
        sureness.saw(1, GREEDY, [0.8, 0.5])
    assert sureness.knows(GREEDY)
    assert not sureness.knows(WARM)
    assert sureness.imagined([1, 2], [GREEDY] * 2)[:, :, 1] == pytest.approx(0.4)
    assert sureness.imagined([2], [GREEDY])[:, 0, 2] == pytest.approx(0.4 * 0.65)
    for _ in range(30):
        sureness.saw(2, GREEDY, [0.2])
    assert sureness.imagined([2], [GREEDY])[:, 0, 0] == pytest.approx(0.2)
    sureness.keep([1])
    firsts = {first for _ in range(30) for first in sureness.imagined([2], [GREEDY])[:, 0, 0].round(6).tolist()}
    assert firsts == {0.8, 0.2}  # forgotten: by its class again


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_rounds_are_valued_by_the_best_that_could_be_offered(rows, depth, data):
    """By trying every way to cut all chains, with limits, for each length."""
    cells = st.floats(0, 1)
    chances = np.array(data.draw(st.lists(cells, min_size=rows * depth, max_size=rows * depth))).reshape(1, rows, depth)
    limits = np.array(data.draw(st.lists(st.integers(0, depth), min_size=rows, max_size=rows)))
    imagined, drafting_s = np.cumprod(chances, axis=2), [0.3 * (level + 1) for level in range(depth)]
    found = goodputs(imagined, limits, rows, lambda slots: 1 + 0.2 * slots, drafting_s)
    for level in range(depth):
        ways = product(*(range(min(limit, level + 1) + 1) for limit in limits.tolist()))
        best = max(
            (rows + sum(imagined[0, row, :count].sum() for row, count in enumerate(way)))
            / (1 + 0.2 * sum(way) + drafting_s[level])
            for way in ways
        )
        assert found[level, 0] == pytest.approx(best)
