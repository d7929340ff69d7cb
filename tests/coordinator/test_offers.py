"""Which drafted tokens are checked, by how sure their draft is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.coordinator.offers import (
    DraftSize,
    Sureness,
    Told,
    Worths,
    best_end,
    best_size,
    offered,
    offered_blindly,
)

GREEDY, WARM = (None, 0), (None, 2)
CLIFF = np.array([10.0, 10.2, 10.4, 15, 15.2, 15.4, *np.arange(15.6, 40, 0.2)])  # the third token more is dear


def chains(worths):
    """Of chains of one length, float64 [chains, n]."""
    places = np.broadcast_to(np.arange(worths.shape[1]), worths.shape)
    return Worths(worths, places - 1, places)


def tree(*draft):
    """What is said of a tree of (sureness, parent)."""
    return Told(*(list(column) for column in zip(*draft, strict=True)))


def chain(*sureness):
    return Told(sureness, range(-1, len(sureness) - 1))


def counts(chosen):
    """How many tokens of each chain; what is offered of it has no gaps."""
    found = chosen.sum(axis=1).tolist()
    assert (chosen == (np.arange(chosen.shape[1]) < chosen.sum(axis=1, keepdims=True))).all()
    return found


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
    one, two = (counts(offered_blindly(chains(np.cumprod(each, axis=1)), count, seconds)) for each in (chances, others))
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
    assert law(lambda worths: counts(offered_blindly(chains(worths), 2, seconds))) == pytest.approx(TARGET)
    alike = law(lambda worths: counts(offered(worths, best_end(-np.sort(-worths, axis=None), 2, seconds))))
    assert abs(alike - TARGET).max() > 0.01


def test_behind_a_first_token_what_pays_is_offered():
    """Cheap rows: all that is likely. Dear ones: nothing, or the first tokens that pay alone."""
    worths = np.array([[0.9, 0.8, 0.1], [0.6, 0.1, 0.0]])
    for seconds, wanted in (
        (1 + 0.1 * np.arange(5), [2, 1]),
        (1 + 0.4 * np.arange(5), [1, 0]),
        (1 + 0.8 * np.arange(5), [0, 0]),
        (np.array([1, 1.1, np.inf, np.inf, np.inf]), [1, 0]),
    ):
        assert counts(offered_blindly(chains(worths), 2, seconds)) == wanted


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 16), st.data())
def test_the_most_valuable_tokens_are_offered_each_behind_its_chain(count, depth, end, data):
    """Nothing that is left out is worth more than what is offered, and equal ones make no gaps."""
    cells = data.draw(st.lists(st.floats(0, 1), min_size=count * depth, max_size=count * depth))
    drafts = np.cumprod(np.array(cells).reshape(count, depth), axis=1)
    chosen = offered(drafts, end)
    assert sum(counts(chosen)) == min(end, int((drafts > 0).sum()))  # none that is worth nothing
    assert min(drafts[chosen], default=1.0) >= max(drafts[~chosen], default=0.0)


def test_a_dear_token_is_passed_only_for_more_behind_it():
    """Two tokens fit below the cliff; with many good ones it pays to go beyond it."""
    assert best_end(np.full(3, 0.6), 4, CLIFF[:4]) == 2
    assert best_end(np.full(12, 0.9), 4, CLIFF[:13]) == 12


def test_what_a_draft_says_of_itself_is_set_right():
    """One that is kept half as often as it says is believed half as much; another range, or class, is not touched."""
    sureness = Sureness(2)
    for number in range(400):
        sureness.observe([GREEDY], [[(0.9, bool(number % 2))]])
    found = sureness.worths([GREEDY, GREEDY, WARM], [chain(0.9, 0.3), chain(0.3), chain(0.9)]).values
    assert found[0] == pytest.approx([0.5, 0.5 * 0.3], abs=0.05)
    assert found[1:] == pytest.approx(np.array([[0.3, 0], [0.9, 0]]))


def test_what_is_imagined_is_what_such_drafts_said():
    """Of the class at first, of the request where it has enough of its own; deeper ones lose as much as on average."""
    sureness = Sureness(3)
    assert not sureness.knows(GREEDY)
    for _ in range(8):
        sureness.saw(1, GREEDY, chain(0.8, 0.5))
    assert sureness.knows(GREEDY)
    assert not sureness.knows(WARM)
    for worths in sureness.imagined([1, 2], [GREEDY] * 2):
        assert worths.values == pytest.approx(np.array([[0.8, 0.4, 0.4 * 0.65]] * 2))
        assert worths.levels.tolist() == [[0, 1, 2]] * 2
    for _ in range(30):
        sureness.saw(2, GREEDY, chain(0.2))
    assert [worths.values[0, 0] for worths in sureness.imagined([2], [GREEDY])] == pytest.approx([0.2] * 48)
    sureness.keep([1])
    firsts = {round(float(worths.values[0, 0]), 6) for _ in range(30) for worths in sureness.imagined([2], [GREEDY])}
    assert firsts == {0.8, 0.2}  # forgotten: by its class again


def test_small_trees_say_nothing_of_large_ones():
    """Once there are some large drafts, only these stand for what there could be; small ones do until then."""
    sureness = Sureness(1)
    small, large = tree((0.5, -1)), tree((0.5, -1), (0.25, -1))
    for _ in range(30):
        sureness.saw(1, GREEDY, small, large=False)
    assert [worths.values.tolist() for worths in sureness.imagined([1], [GREEDY])] == [[[0.5]]] * 48
    for _ in range(8):
        sureness.saw(2, GREEDY, large)
        sureness.saw(1, GREEDY, small, large=False)
    assert [worths.values.tolist() for worths in sureness.imagined([1], [GREEDY])] == [[[0.5, 0.25]]] * 48


def test_a_tree_goes_on_behind_its_first_tokens_where_it_was_not_drafted_so_deep():
    """Here behind both of its second level, each with what first siblings are kept on average: 0.6, 0.4 and 0.2."""
    sureness = Sureness(3)
    for _ in range(8):
        sureness.saw(1, GREEDY, tree((0.6, -1), (0.3, -1), (0.4, 0), (0.2, 1)))
    worths = sureness.imagined([1], [GREEDY])[0]
    assert worths.parents.tolist() == [[-1, -1, 0, 1, 2, 3]]
    assert worths.levels.tolist() == [[0, 0, 1, 1, 2, 2]]
    assert worths.values == pytest.approx(np.array([[0.6, 0.3, 0.24, 0.06, 0.24 * 0.4, 0.06 * 0.4]]))


@st.composite
def said_trees(draw):
    """Trees, siblings one behind the other, all before their children."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        counts_of, parents, at = [draw(st.integers(1, 3))], [], -1
        while at < len(parents):
            parents += [at] * (counts_of[0] if at < 0 else draw(st.integers(0, 2)) if len(parents) < 8 else 0)
            at += 1
        chances = st.lists(st.floats(0, 1), min_size=len(parents), max_size=len(parents))
        found.append(Told(draw(chances), parents))
    return found


def gaps(told, chosen):
    """Tokens that are offered without their parent or a sibling before them."""
    return [
        at
        for each, mine in zip(told, chosen, strict=True)
        for at, parent in enumerate(each.parents)
        if mine[at]
        and not ((parent < 0 or mine[parent]) and (at == 0 or each.parents[at - 1] != parent or mine[at - 1]))
    ]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(said_trees(), st.integers(0, 12), st.floats(0, 2))
def test_no_token_of_a_tree_is_offered_without_those_before_it(told, end, price):
    """Its parent and its elder siblings, whichever way is chosen, and none that there is not."""
    worths = Sureness(9).worths([GREEDY] * len(told), told)
    firsts = sum(each.parents.count(-1) for each in told)
    seconds = 1 + price * np.arange(firsts + len(told) + 1)
    tokens = sum(len(each.parents) for each in told)
    for chosen in (offered(worths.values, min(end, tokens)), offered_blindly(worths, len(told), seconds)):
        real = [mine[: len(each.parents)] for each, mine in zip(told, chosen, strict=True)]
        assert sum(map(sum, real)) == chosen.sum()
        assert gaps(told, real) == []


def drawn_tree_law(rule):
    """The law of a first answer token behind two drawn siblings, enumerated; the draft of each one's child is random.

    Each has a child of which the draft is sure behind token 0 only. Siblings are drawn without replacement, and tried
    in order, each against what the ones before it left.
    """
    first = DRAFT.max() ** 0.5
    found = np.zeros(3)
    for one, two in product(range(3), repeat=2):
        if one == two:
            continue
        chance = DRAFT[one] * DRAFT[two] / (1 - DRAFT[one])
        told = tree((first, -1), (first * (1 - first), -1), (0.99 * (one == 0), 0), (0.99 * (two == 0), 1))
        chosen = rule(Sureness(2).worths([WARM], [told]))[0]
        left, draft = TARGET, DRAFT
        for token, offers in ((one, chosen[0]), (two, chosen[1])):
            if not offers:
                break
            kept = min(1.0, left[token] / draft[token])
            found[token] += chance * kept
            chance *= 1 - kept
            rest = np.maximum(0, left - draft)
            left = rest / rest.sum() if rest.sum() else left
            draft = np.where(np.arange(3) == token, 0, draft) / (1 - draft[token])
        found += chance * left
    return found


@pytest.mark.parametrize("price", [0.05, 0.1, 0.15, 0.2, 0.3, 0.5])
def test_drawn_trees_keep_the_targets_law(price):
    seconds = np.cumsum([1.0, price, 0.5 * price, 3 * price])
    assert drawn_tree_law(lambda worths: offered_blindly(worths, 1, seconds)) == pytest.approx(TARGET)


def test_trees_of_which_the_best_tokens_are_taken_do_not():
    """Where what is behind a token decides whether it is offered."""
    seconds = np.array([1.0, 1.9, 1.95, 2.0, 2.05])
    ends = lambda worths: best_end(-np.sort(-worths.values, axis=None), 1, seconds)  # noqa: E731
    found = drawn_tree_law(lambda worths: offered(worths.values, ends(worths)))
    assert abs(found - TARGET).max() > 0.01


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_rounds_are_valued_by_the_best_that_could_be_offered(rows, depth, data):
    """By trying every way to cut all chains, with limits, for each length, of which the best is chosen."""
    cells = st.floats(0, 1)
    chances = np.array(data.draw(st.lists(cells, min_size=rows * depth, max_size=rows * depth))).reshape(1, rows, depth)
    limits = np.array(data.draw(st.lists(st.integers(0, depth), min_size=rows, max_size=rows)))
    imagined, waits = np.cumprod(chances, axis=2), [0.3 * (level + 1) for level in range(depth)]

    def best_of(levels):
        ways = product(*(range(min(limit, levels) + 1) for limit in limits.tolist()))
        return max(
            (rows + sum(imagined[0, row, :count].sum() for row, count in enumerate(way)))
            / (1 + 0.2 * sum(way) + waits[levels - 1])
            for way in ways
        )

    sizes = [DraftSize(level + 1, level + 1, waits[level]) for level in range(depth)]
    worths = [chains(imagined[0])]
    found = [best_size(worths, limits, rows, lambda slots: 1 + 0.2 * slots, [size])[1] for size in sizes]
    assert found == pytest.approx([best_of(size.levels) for size in sizes])
    size, goodput, _ = best_size(worths, limits, rows, lambda slots: 1 + 0.2 * slots, sizes)
    assert goodput == pytest.approx(max(found))
    assert found[size.levels - 1] == goodput


def test_smaller_trees_have_what_is_worth_most():
    """Of four nodes two: 0.8 and 0.4; one level of them: 0.8 and 0.3."""
    worths = Sureness(2).worths([GREEDY], [tree((0.8, -1), (0.3, -1), (0.5, 0), (0.1, 1))])
    for size, wanted in ((DraftSize(2, 2, 1.0), 1 + 0.8 + 0.4), (DraftSize(1, 2, 1.0), 1 + 0.8 + 0.3)):
        found = best_size([worths], np.array([2]), 1, lambda slots: 1 + 0.0 * slots, [size])
        assert found[1:] == pytest.approx((wanted / 2, 2))


def test_tokens_that_there_are_not_or_that_are_worth_nothing_are_never_offered():
    """Even where more tokens were held to cost less: drafts of unequal size, one with a token of no worth."""
    told = [chain(0.5), tree((0.9, -1), (0.0, -1))]
    worths = Sureness(2).worths([GREEDY] * 2, told)
    falling = 1 - 0.01 * np.arange(6)
    assert offered(worths.values, 3).tolist() == [[True, False], [True, False]]
    assert offered_blindly(worths, 2, falling).tolist() == [[True, False], [True, False]]
