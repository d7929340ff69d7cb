"""Which drafted tokens are checked, by how sure their draft is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.coordinator.offers import (
    LOOKS_AHEAD,
    Sureness,
    best_end,
    blind_end,
    goodputs,
    offered,
)

GREEDY, WARM = (None, 0), (None, 2)
CLIFF = np.array([10.0, 10.2, 10.4, 15, 15.2, 15.4, *np.arange(15.6, 40, 0.2)])  # the third token more is dear


@st.composite
def orders(draw):
    """Worths that fall, a number of requests, and seconds that rise, far enough for both ways to choose."""
    worths = sorted(draw(st.lists(st.floats(0, 1), min_size=1, max_size=8)), reverse=True)
    rises = draw(st.lists(st.floats(0.001, 2), min_size=len(worths) + LOOKS_AHEAD, max_size=len(worths) + LOOKS_AHEAD))
    return np.array(worths), draw(st.integers(1, 8)), np.cumsum([1.0, *rises])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(orders())
def test_no_other_end_makes_more_tokens_per_second(order):
    worths, rows, seconds = order
    goodput = [(rows + worths[:end].sum()) / seconds[end] for end in range(len(worths) + 1)]
    assert goodput[best_end(worths, rows, seconds[: len(worths) + 1])] == pytest.approx(max(goodput))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(orders(), st.data())
def test_whether_a_token_is_taken_has_nothing_to_do_with_those_behind_it(order, data):
    """With any others behind it, more or fewer, it is taken as it was."""
    worths, rows, seconds = order
    place = data.draw(st.integers(0, len(worths) - 1))
    behind = sorted(data.draw(st.lists(st.floats(0, float(worths[place])), max_size=7)), reverse=True)
    others = np.array([*worths[: place + 1], *behind])
    seconds = np.concatenate([seconds, seconds[-1] + np.arange(1, 9)])
    taken = blind_end(worths, rows, seconds[: len(worths) + 1 + LOOKS_AHEAD]) > place
    assert (blind_end(others, rows, seconds[: len(others) + 1 + LOOKS_AHEAD]) > place) == taken


def law(end_of):
    """The first answer token's law, enumerated: a draft of two tokens, whose second is sure behind `a` only."""
    target, draft = {"a": 0.3, "b": 0.5, "c": 0.2}, {"a": 0.5, "b": 0.3, "c": 0.2}
    first = max(draft.values()) ** 0.5
    residual = {token: max(0.0, target[token] - draft[token]) for token in target}
    found = dict.fromkeys(target, 0.0)
    for token, chance in draft.items():
        worths = np.array([first, first * (1.0 if token == "a" else 0.0)])
        if end_of(worths) == 0:
            found = {each: found[each] + chance * target[each] for each in found}
            continue
        kept = min(1.0, target[token] / chance)
        found[token] += chance * kept
        for each in found:
            found[each] += chance * (1 - kept) * residual[each] / sum(residual.values())
    return found, target


def test_drawn_tokens_keep_the_targets_law():
    """Where the first token alone does not pay and two would, stopping keeps the law, and looking ahead breaks it."""
    seconds = np.array([1.0, 1.75, 1.8, *np.arange(2.6, 4.4, 0.1)])
    found, target = law(lambda worths: blind_end(worths, 1, seconds[: 3 + LOOKS_AHEAD]))
    assert found == pytest.approx(target)
    broken, _ = law(lambda worths: best_end(worths, 1, seconds[:3]))
    assert broken["a"] != pytest.approx(target["a"], abs=0.01)


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
    """Two tokens fit below the cliff; with many good ones it pays to go beyond it, for either way to choose."""
    few, many = np.full(3, 0.6), np.full(12, 0.9)
    assert best_end(few, 4, CLIFF[:4]) == 2
    assert best_end(many, 4, CLIFF[:13]) == 12
    assert blind_end(many, 4, CLIFF[: 13 + LOOKS_AHEAD]) == 12


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
    assert not sureness.known([GREEDY])
    for _ in range(4):
        sureness.saw(1, GREEDY, [0.8, 0.5])
    assert sureness.known([GREEDY, GREEDY])
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
    found = goodputs(imagined, limits, lambda slots: 1 + 0.2 * slots, drafting_s)
    for level in range(depth):
        ways = product(*(range(min(limit, level + 1) + 1) for limit in limits.tolist()))
        best = max(
            (rows + sum(imagined[0, row, :count].sum() for row, count in enumerate(way)))
            / (1 + 0.2 * sum(way) + drafting_s[level])
            for way in ways
        )
        assert found[level, 0] == pytest.approx(best)
