"""Branches in columns: the same as one by one, whatever the order in which their tokens come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.coordinator.allotment import Bounds, allot
from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.branches import AheadPlan, Trunk
from specserve.coordinator.chain import Chain
from specserve.coordinator.outcomes import Guess, OutcomeOdds
from specserve.coordinator.requests import RequestState
from specserve.coordinator.slots import SlotPool
from specserve.errors import ProtocolError
from specserve.transport.messages import Dists, PushAhead
from specserve.types import Request, RequestId, RowId

BLOCK = 4
VOCAB = 50


def trunk(number, length, chain, fed=0, left=20, due=True):
    """A request of `length` tokens with a chain, of which the draft has cached all but `fed` of the last ones."""
    request = Request(RequestId(str(number)), tuple(range(length)), left)
    state = RequestState(RowId(number), request, "me", 0.0, list(range(length)), None)
    start = max(0, length + chain - max(1, fed))
    drafted = Chain([7] * chain, list(range(chain)))
    return Trunk(state, 0, length, start, length + chain - start, drafted, due)


TRUNKS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 4), st.integers(0, 6), st.integers(1, 9), st.booleans()), max_size=4
).map(lambda rows: [trunk(number, *row) for number, row in enumerate(rows)])


def one_by_one(trunks, wanted, odds, count, bounds, free_slots, blocks):
    """The likeliest outcome of every trunk, then the second of every one, until something runs out."""
    found, free_blocks = [], blocks.free_count
    candidates = [(index, place) for place in range(count) for index, each in enumerate(trunks) if each.due]
    for index, place in candidates:
        each = trunks[index]
        outcomes = odds.likeliest(len(each.chain))
        if place >= len(outcomes):
            continue
        kept, rank = int(outcomes.kept[place]), int(outcomes.ranks[place])
        end = each.base + kept
        first = 0 if kept < len(each.chain) and each.start >= end else 1
        depth = min(bounds.steps - first, wanted[index], each.state.tokens_left - kept - 2, bounds.context - end - 2)
        if depth <= 0:
            continue
        depth = min(depth, free_slots)
        own = blocks.needed(end + depth) - end // BLOCK
        if depth <= 0 or own > free_blocks:
            break
        free_slots, free_blocks = free_slots - depth, free_blocks - own
        found.append((index, kept, rank, first, depth, own))
    return sorted(found, key=lambda branch: branch[0])


@settings(max_examples=200, deadline=None)
@given(
    trunks=TRUNKS,
    wanted=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    count=st.integers(0, 20),
    steps=st.integers(2, 6),
    context=st.integers(5, 30),
    slots=st.integers(0, 60),
    blocks=st.integers(0, 30),
)
def test_branches_are_allotted_as_one_by_one(trunks, wanted, count, steps, context, slots, blocks):
    """For any requests, bounds and room, the columns hold what a plain loop over outcomes and trunks gives."""
    odds, pool, bounds = OutcomeOdds(3), BlockPool(blocks, BLOCK), Bounds(steps, context)
    branches = allot(trunks, wanted[: len(trunks)], odds, count, bounds, SlotPool(slots), pool)
    columns = (branches.trunks, branches.kept, branches.ranks, branches.firsts, branches.depths, branches.own)

    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert found == one_by_one(trunks, wanted, odds, count, bounds, slots, pool)


class Case:
    """A plan for three trunks with nine branches each, and the pushes that a worker would send for it."""

    def __init__(self, drawn=True):
        self.slots, self.blocks = SlotPool(200), BlockPool(200, BLOCK)
        self.trunks = [trunk(0, 9, 3, 1), trunk(1, 6, 2, 4), trunk(2, 5, 0, 2)]
        for each in self.trunks:
            self.blocks.cover(each.state.draft_table, each.base + len(each.chain))
        branches = allot(self.trunks, [3] * 3, OutcomeOdds(2), 9, Bounds(4, 100), self.slots, self.blocks)
        self.plan = AheadPlan(1, self.trunks, branches, 0.0, self.slots, self.blocks)
        self.message = self.plan.message()
        self.leased = self.message.slots.tolist()
        steps = 1 + int((self.message.firsts + self.message.depths).max())
        self.events = [[(branch, -1, 20 + self.rank(branch)) for branch in range(len(branches))]]
        self.events += [[] for _ in range(steps)]
        for branch, depth in enumerate(self.message.depths.tolist()):
            for place in range(depth):
                step = int(self.message.firsts[branch]) + place
                self.events[step].append((branch, place, 10 * branch % VOCAB + place))
        self.drawn = drawn

    def rank(self, branch):
        return int(self.message.ranks[branch])

    def push(self, step, **changes):
        columns = np.array(self.events[step], dtype=np.int32).reshape(-1, 3)
        rows = [(branch, place, 0) for branch, place, _ in self.events[step] if place >= 0]
        dists = Dists("sparse", 1, np.array(rows, dtype=np.uint8).reshape(-1, 3)) if self.drawn else Dists.none()
        fields = {"branches": columns[:, 0], "places": columns[:, 1], "tokens": columns[:, 2], "dists": dists} | changes
        return PushAhead(1, step, False, **fields, busy_s=0.001)


@pytest.fixture(params=[0, 1000], ids=["arrays", "one by one"])
def either_way(request, monkeypatch):
    """Few pushed nodes are seen to one by one, many as arrays: to both of which the same holds."""
    monkeypatch.setattr("specserve.coordinator.branches._FEW", request.param)
    for size in ("_MOSTLY", "_SMALL"):  # dists: push by push, or all joined
        monkeypatch.setattr(f"specserve.coordinator.branches.{size}", request.param)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_branch_that_comes_true_brings_what_has_come_for_it(seed, drawn):
    """Any pushes in any order: chain, slots, dists and table are those of that branch, up to the first gap."""
    random, case = np.random.default_rng(seed), Case(drawn)
    steps = [0, *(step for step in range(1, len(case.events)) if random.random() < 0.7)]
    random.shuffle(steps)
    for step in steps:
        assert case.plan.take(case.push(step), VOCAB)
        assert not case.plan.take(case.push(step), VOCAB)
    owners = np.repeat(np.arange(3), case.message.branch_counts).tolist()
    picked = [int(random.choice([b for b, owner in enumerate(owners) if owner == each])) for each in range(3)]
    tables = [list(each.state.draft_table) for each in case.trunks]
    true, guesses = case.plan.find(
        [(owners[branch], int(case.message.parents[branch]), 20 + case.rank(branch)) for branch in picked]
    )
    case.plan.adopt(true)

    assert true == list(enumerate(picked))
    assert sum(guess.right for guess in guesses) == 3
    starts = (np.cumsum(case.message.depths) - case.message.depths).tolist()
    own_starts = (np.cumsum(case.message.own_lengths) - case.message.own_lengths).tolist()
    for each, branch, table in zip(case.trunks, picked, tables, strict=True):
        come = {place: token for step in steps for b, place, token in case.events[step] if b == branch and place >= 0}
        length = next(place for place in range(9) if place not in come)
        chain = each.state.chain
        assert chain.tokens == [come[place] for place in range(length)]
        assert chain.slots == case.leased[starts[branch] : starts[branch] + length]
        end = each.base + int(case.message.parents[branch])
        own = case.message.own_blocks[own_starts[branch] :][: case.message.own_lengths[branch]].tolist()
        assert list(each.state.draft_table) == (table[: end // BLOCK] + own if length else table)
        if length:
            assert each.state.draft_cached == end + length
        behind = case.leased[starts[branch] + length] if 0 < length < int(case.message.depths[branch]) else None
        assert (chain.next_slot, chain.plan) == (behind, 1 if length else 0)
        for place in range(length if drawn else 0):
            assert chain.dists.rows[chain.row + place].tolist() == [branch, place, 0]
        assert drawn or chain.dists is None
    case.plan.release()
    case.slots.check()
    case.blocks.check()
    assert case.slots.held_count == sum(len(each.state.chain.held) for each in case.trunks)
    assert case.blocks.held_count == sum(len(each.state.draft_table) for each in case.trunks)


def test_an_outcome_that_nobody_foresaw_changes_nothing():
    """A token that no branch guessed is a miss, and its guesses were wrong; one that has not come says nothing."""
    case = Case()
    assert case.plan.find([(0, 0, 20)]) == ([], [])
    case.plan.take(case.push(0), VOCAB)
    assert case.plan.find([(0, 0, 49)])[0] == []
    assert case.plan.find([(0, 0, 20)])[0] != []
    assert case.plan.find([(2, 0, 49)])[1] == [Guess(True, rank, False) for rank in range(3)]


@pytest.mark.usefixtures("either_way")
def test_a_guess_that_is_told_twice_comes_true_once():
    """A worker whose guesses at one place are all the same token: the likeliest is right, and the pools add up."""
    case = Case()
    case.plan.take(case.push(0, tokens=np.where(case.push(0).places < 0, 20, case.push(0).tokens)), VOCAB)
    for step in range(1, len(case.events)):
        case.plan.take(case.push(step), VOCAB)
    places = [(owner, int(case.message.parents[first])) for owner, first in ((0, 0), (1, 9), (2, 18))]
    true, guesses = case.plan.find([(owner, kept, 20) for owner, kept in places])
    case.plan.adopt(true)

    assert [owner for owner, _ in true] == [0, 1, 2]
    assert [case.rank(branch) for _, branch in true] == [0, 0, 0]
    assert len(guesses) > sum(guess.right for guess in guesses) == 3
    case.plan.release()
    case.slots.check()
    case.blocks.check()
    assert case.slots.held_count == sum(len(each.state.chain.held) for each in case.trunks)
    assert case.blocks.held_count == sum(len(each.state.draft_table) for each in case.trunks)


def test_who_left_or_moved_on_has_no_trunk():
    """A request that ended, was preempted, or stands at another length takes nothing over."""
    case = Case()
    states = [each.state for each in case.trunks]
    assert case.plan.trunk_of(states[0], 9) == 0
    assert case.plan.trunk_of(states[0], 10) is None
    states[1].epoch += 1
    assert case.plan.trunk_of(states[1], 6) is None
    case.plan.leave(states[2])
    assert case.plan.trunk_of(states[2], 5) is None


def ints(*values):
    return np.array(values, dtype=np.int32)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    "changes",
    [
        {"branches": ints(-1), "places": ints(-1), "tokens": ints(1)},
        {"branches": ints(99), "places": ints(-1), "tokens": ints(1)},
        {"branches": np.array([1 << 32]), "places": ints(-1), "tokens": ints(1)},  # of a worker that counts wider
        {"branches": ints(0), "places": ints(-2), "tokens": ints(1)},
        {"branches": ints(0), "places": ints(9), "tokens": ints(1)},
        {"branches": ints(0), "places": ints(-1), "tokens": ints(-1)},
        {"branches": ints(0), "places": ints(-1), "tokens": ints(VOCAB)},
        {"branches": ints(0, 1), "places": ints(-1), "tokens": ints(1)},
        {"branches": ints(0), "places": ints(0), "tokens": ints(1), "dists": Dists("sparse", 1, np.zeros((2, 3)))},
        {"branches": ints(0), "places": ints(0), "tokens": ints(1), "dists": Dists.none()},  # others had theirs
    ],
)
def test_an_impossible_push_is_refused_and_leaves_the_plan_alone(changes):
    """Each is a ProtocolError; the same step can still be pushed as it should be."""
    case = Case()
    case.plan.take(case.push(0), VOCAB)
    fields = {"dists": Dists("sparse", 1, np.zeros((0, 3)))} | changes
    with pytest.raises(ProtocolError):
        case.plan.take(case.push(1, **fields), VOCAB)

    assert case.plan.take(case.push(1), VOCAB)


def test_a_branch_that_shares_one_block_too_many_shows(monkeypatch):
    """The comparison of tables can fail."""

    def broken(self, state, shared, begin, end):
        return real(self, state, shared + 1, begin, end)

    real = AheadPlan._adopt_table
    monkeypatch.setattr(AheadPlan, "_adopt_table", broken)
    with pytest.raises(AssertionError):
        test_a_branch_that_comes_true_brings_what_has_come_for_it(0, True)
