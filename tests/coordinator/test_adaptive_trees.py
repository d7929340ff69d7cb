"""Sizes of trees by what nodes are worth and cost: the worths, the shapes, and the policy against made-up devices."""

from __future__ import annotations

import random
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.coordinator.acceptance import Acceptance
from specserve.coordinator.adaptive_depth import AdaptiveDepth, DraftTiming
from specserve.coordinator.depth import Checked, FixedDepth
from specserve.coordinator.node_worth import node_worths
from specserve.coordinator.trees import tree_of
from specserve.tree_shape import TreeShape, static
from specserve.types import RoundStats, RowId

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
    for turn in range(400):
        rank = (0, 1, 0, -1)[turn % 4]
        met = [(2, rank)] if rank < 0 else [(2, rank), (1, -1)]
        acceptance.observe([Checked(RowId(1), 2, int(rank >= 0), 3, met)], 1)
    first, second = acceptance.of_all()
    assert first[:2].tolist() == pytest.approx([0.5, 0.25], abs=0.03)
    assert first[2] == pytest.approx((1 - first[:2].sum()) * first[0])
    assert second[0] < 0.05


class Pretended:
    """Rounds of requests whose drafts are kept by fixed chances, on a device of these costs, with a policy to decide.

    chances [level, rank]. cost_s is a target step's time by positions, step_s a draft step's by the tokens it makes.
    """

    def __init__(self, requests, chances, cost_s, step_s, shape=TreeShape(None, 3, 6)):  # noqa: B008 (frozen)
        self.policy = AdaptiveDepth(FixedDepth(len(chances), 10**6, None, shape), DraftTiming.WAITED)
        self.states = [
            SimpleNamespace(row=RowId(n), request=SimpleNamespace(depth=None), longest=10**6, tokens=[], chain=None)
            for n in range(requests)
        ]
        self.chances, self.cost_s, self.step_s, self.shape = chances, cost_s, step_s, shape
        self.draw = random.Random(7)
        self.seconds, self.tokens, self.sizes = 0.0, 0, []

    def round(self):
        """One round, booked."""
        self.policy.plan(self.states)
        sizes = [self._size(state) for state in self.states]
        checked = [self._check(state, *size) for state, size in zip(self.states, sizes, strict=True)]
        nodes, levels, rows = sum(size for size, _ in sizes), max(depth for _, depth in sizes), len(self.states)
        waited_s = levels * self.step_s(max(rows, nodes / levels)) if nodes else 0.0
        wall_s = self.cost_s(rows + nodes) + waited_s
        self.policy.observe(RoundStats(rows, rows + nodes, 0, wall_s, waited_s, 0.0, 0.0, (), (), 0, 0, 0), checked)
        self.seconds += wall_s
        self.tokens += sum(each.kept + 1 for each in checked)
        self.sizes.append([size for size, _ in sizes])

    def _size(self, state):
        shape, depth = self.policy.shape(state), self.policy.of(state)
        return shape.nodes(depth), depth

    def _check(self, state, nodes, depth):
        """The tree has the nodes that are worth most; the path is drawn."""
        every = sorted(
            ((-worth, ranks) for ranks, worth in every_node(self.chances[:depth], self.shape).items()),
        )[:nodes]
        inside = {ranks for _, ranks in every}
        path, met = (), []
        while siblings := sum(1 for ranks in inside if len(ranks) == len(path) + 1 and ranks[:-1] == path):
            chance = self.draw.random()
            below = np.cumsum(self.chances[len(path)][:siblings])
            rank = int(np.argmax(below > chance)) if below[-1] > chance else -1
            met.append((siblings, rank))
            if rank < 0:
                break
            path = (*path, rank)
        return Checked(state.row, max((len(ranks) for ranks in inside), default=0), len(path), nodes, met)

    def speed(self, rounds, warm):
        """Tokens per second against plain decoding."""
        for _ in range(warm):
            self.round()
        self.seconds, self.tokens, self.sizes = 0.0, 0, []
        for _ in range(rounds):
            self.round()
        rows = len(self.states)
        return self.tokens / self.seconds * self.cost_s(rows) / rows


CHANCES = np.array([[0.4, 0.15, 0.08], [0.45, 0.12, 0.05], [0.45, 0.1, 0.05]])


def cpu_s(positions):
    """Cheap up to eight positions, then each costs a twelfth of a step, as on a CPU."""
    return 0.020 * (1 + 0.02 * min(positions, 8) + max(0, positions - 8) / 12)


def small_step_s(tokens):
    return 0.001 + 0.0002 * tokens


def test_one_request_gets_nearly_the_whole_tree_and_eight_decode_plainly():
    """The same policy and device: alone at least 0.95 of what whole trees make, together at least 0.97 of plain."""
    alone = Pretended(1, CHANCES, cpu_s, small_step_s)
    found = alone.speed(1500, 300)
    whole = Pretended(1, CHANCES, cpu_s, small_step_s)
    whole.policy.plan = lambda states: None
    whole.policy._slots, whole.policy._depths = {RowId(0): 6}, {RowId(0): 3}
    assert found >= 0.95 * whole.speed(1500, 0)
    assert found > 1.2
    assert np.mean([size for (size,) in alone.sizes]) > 4

    together = Pretended(8, CHANCES, cpu_s, small_step_s)
    assert together.speed(1500, 100) >= 0.97
    assert np.mean(together.sizes) < 0.3


def test_few_requests_get_small_trees_where_positions_cost_more_and_more():
    """Three at once: eight positions are cheap, so there is room for one or two nodes each, and that pays."""
    few = Pretended(3, CHANCES, cpu_s, small_step_s)
    assert few.speed(1500, 300) >= 1.0
    assert 0.5 < np.mean(few.sizes) < 4


def test_nodes_go_where_drafts_are_kept():
    """Two requests of which one keeps nothing: once that shows, the other one has most nodes."""
    sure = np.array([[0.7, 0.15, 0.05]] * 3)
    pair = Pretended(2, sure, lambda positions: 0.020 + 0.001 * positions, small_step_s)
    kept = pair._check

    def one_keeps_nothing(state, nodes, depth):
        each = kept(state, nodes, depth)
        first = each.met[:1] and [(each.met[0][0], -1)]
        return each if state.row == 0 else each._replace(kept=0, met=first)

    pair._check = one_keeps_nothing
    pair.speed(200, 300)
    first, second = np.sum(pair.sizes, axis=0)
    assert first > 2 * second


def test_drafting_comes_back_for_one_request_after_many_were_there():
    """Off while eight decode; when one is left, its trees are whole again within 600 rounds."""
    many = Pretended(8, CHANCES, cpu_s, small_step_s)
    many.speed(200, 0)
    assert not many.policy._switch.on
    del many.states[1:]
    many.speed(100, 600)
    assert np.mean(many.sizes) > 3
