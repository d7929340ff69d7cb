"""Sizes of trees by what nodes are worth and cost: the worths, the shapes, and the policy against made-up devices."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended_rounds import Kind, Machine, Pretended, total

from specserve.coordinator.acceptance import Acceptance
from specserve.coordinator.depth import Checked
from specserve.coordinator.node_worth import node_worths
from specserve.coordinator.trees import tree_of
from specserve.tree_shape import TreeShape, static
from specserve.types import RowId, Sampling

SHAPES = st.one_of(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda branching: static(tuple(branching))),
    st.builds(TreeShape, st.none(), st.integers(1, 3), st.integers(1, 9)),
)


@st.composite
def tables(draw):
    """A shape, and shares of which those of one level sum up to 1 at most, and fall with the rank."""
    shape = draw(SHAPES)
    depth = draw(st.integers(1, 3)) if shape.branching is None else len(shape.branching)
    levels = [
        sorted(draw(st.lists(st.floats(0, 1), min_size=shape.widest, max_size=shape.widest))) for _ in range(depth)
    ]
    return shape, np.array([[share / shape.widest for share in reversed(level)] for level in levels])


def every_node(shares, shape):
    """Worth by ranks along the path, of all nodes that there may be."""
    found = {}
    for level in range(len(shares)):
        for ranks in product(*(range(shape.children(each)) for each in range(level + 1))):
            found[ranks] = float(np.prod([shares[at][rank] for at, rank in enumerate(ranks)]))
    return found


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tables())
def test_the_most_valuable_nodes_come_first_and_no_more_than_the_shape_allows(table):
    """Against every node: where not only `width` places of a level may have children, the n largest in order."""
    shape, shares = table
    (worths,), (levels,) = node_worths(shares[None], shape)
    every = sorted(every_node(shares, shape).values(), reverse=True)

    assert len(worths) == min(shape.most_nodes, len(worths)) <= shape.nodes(len(shares))
    assert (np.diff(worths) <= 0).all()
    if shape.branching is not None:
        assert worths.tolist() == pytest.approx(every[: len(worths)])
    assert all(worth <= best + 1e-12 for worth, best in zip(worths, every, strict=False))
    for level in range(1, len(shares)):  # a parent is there before its children
        if (levels == level).any():
            assert (levels[: int(np.argmax(levels == level))] == level - 1).any()


def test_a_chain_is_a_tree_of_width_one():
    """Its worths are how likely each place is reached, in order."""
    shares = np.array([[[0.5], [0.8], [0.1]], [[1.0], [0.5], [0.5]]])
    worths, levels = node_worths(shares, static((1, 1, 1)))
    assert worths.tolist() == [pytest.approx([0.5, 0.4, 0.04]), [1.0, 0.5, 0.25]]
    assert levels.tolist() == [[0, 1, 2]] * 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SHAPES, st.integers(1, 3), st.integers(0, 30))
def test_a_smaller_tree_needs_no_more_than_a_larger_one(shape, levels, nodes):
    """Nodes and slots, for every size up to the whole; a tree never needs more slots than it has nodes."""
    smaller = shape.within_nodes(nodes)
    assert smaller.nodes(levels) == min(nodes, shape.nodes(levels))
    assert smaller.parents(levels) <= shape.parents(levels)
    if smaller.nodes(levels):
        assert 1 <= smaller.parents(levels) <= smaller.nodes(levels)


def test_what_is_met_on_the_way_through_a_tree():
    """Each family's size and which of it went on; −1 where none did, and nothing behind a leaf."""
    tree = tree_of([7, 8, 1, 2, 1, 5, 5], [-1, -1, 0, 0, 1, 2, 4], [30, 30, 11, 11, 12, 9, 4], [False] * 7)
    assert tree.met(-1) == [(2, -1)]
    assert tree.met(0) == [(2, 0), (2, -1)]
    assert tree.met(3) == [(2, 0), (2, 1)]
    assert tree.met(6) == [(2, 1), (1, 0), (1, 0)]


def test_ranks_are_told_apart_and_never_tried_ones_lean_on_what_is_left():
    """Rank 0 goes on in half of all rounds, rank 1 in a quarter; the third one was never offered."""
    acceptance = Acceptance(2, 3)
    request = SimpleNamespace(source=None, sampling=Sampling(temperature=0.0))
    acceptance.meet([SimpleNamespace(row=RowId(1), request=request)])
    for turn in range(1600):
        rank = (0, 1, 0, -1)[turn % 4]
        met = [(2, rank)] if rank < 0 else [(2, rank), (1, -1)]
        acceptance.observe([Checked(RowId(1), 2, int(rank >= 0), 3, met)], 1)
    first, second = acceptance.of_class((None, 0))
    assert first[:2].tolist() == pytest.approx([0.5, 0.25], abs=0.03)
    assert first[2] == pytest.approx((1 - first[:2].sum()) * first[0])
    assert second[0] < 0.05


SHAPE = TreeShape(None, 3, 6)
GREEDY = Kind(((0.4, 0.15, 0.08), (0.45, 0.12, 0.05), (0.45, 0.1, 0.05)), spread=0.0)
CALM = Machine(  # a target's positions are cheap up to eight, then each costs a twelfth of a step, as on a CPU
    lambda positions: 20 * (1 + 0.02 * min(positions, 8) + max(0, positions - 8) / 12),
    lambda tokens: 0.6 + 0.2 * tokens,
    late=0.0,
    spells=0.0,
)


def living(requests, rounds, warm, kind=GREEDY, machine=CALM):
    """A tree policy that has seen so many rounds of the same requests, and its account of `rounds` more."""
    life = Pretended(machine, 7, shape=SHAPE)
    states = life.come([kind] * requests)
    total([life.round(states) for _ in range(warm)])
    life.sizes.clear()
    return life, states, total([life.round(states) for _ in range(rounds)])


def test_one_request_gets_nearly_the_whole_tree_and_eight_decode_plainly():
    """The same policy and device: alone at least 0.95 of what the best size makes, together at least 0.97 of plain."""
    alone, _, account = living(1, 1200, 300)
    assert min(account.sizes.values()) / account.took >= 0.95
    assert account.sizes[0] / account.took > 1.2
    assert np.mean(alone.sizes) > 3

    together, _, account = living(8, 1200, 100)
    assert account.sizes[0] / account.took >= 0.97
    assert np.mean(together.sizes) < 0.3


def test_few_requests_get_small_trees_where_positions_cost_more_and_more():
    """Three at once: eight positions are cheap, so there is room for one or two nodes each, and that pays."""
    few, _, account = living(3, 1200, 300)
    assert account.sizes[0] / account.took >= 1.0
    assert 0.5 < np.mean(few.sizes) < 4


def test_nodes_go_where_drafts_are_kept():
    """Two requests of which one keeps nothing: once that shows, the other one has most nodes."""
    life = Pretended(CALM, 7, shape=SHAPE)
    sure, never = Kind(((0.7, 0.15, 0.05),) * 3), Kind(((0.0, 0.0, 0.0),) * 3)
    states = life.come([sure, never])
    for _ in range(500):
        life.round(states)
    first, second = np.sum(life.sizes[300:], axis=0)
    assert first > 2 * second


def test_drafting_comes_back_for_one_request_after_many_were_there():
    """Off while eight decode; when one is left, its trees are large again within 300 rounds."""
    life, states, _ = living(8, 200, 0)
    assert not life.policy._switch.on
    for _ in range(300):
        life.round(states[:1])
    life.sizes.clear()
    for _ in range(100):
        life.round(states[:1])
    assert np.mean(life.sizes) > 2.5
