"""Drafted trees as the coordinator keeps them, and pushes that no draft worker may send."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from harness import Pipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from test_history_machine import TARGET as TABLE
from test_history_machine import TREES, VOCAB, backend, draft_worker

from specserve.config import EngineConfig
from specserve.coordinator.chain import Chain
from specserve.coordinator.trees import Tree, tree_of
from specserve.errors import ProtocolError
from specserve.transport.messages import Push, Verdict
from specserve.tree_shape import static
from specserve.verification.verifier import Verifier

PARENTS = [-1, -1, 0, 0, 1, 2, 4]
TOKENS = [7, 8, 1, 2, 1, 5, 5]
SLOTS = [30, 30, 11, 11, 12, 9, 4]
FED = [True, True, True, False, True, False, False]


def tree() -> Tree:
    return tree_of(TOKENS, PARENTS, SLOTS, FED)


def test_a_tree_knows_its_paths_levels_and_families() -> None:
    """Paths are of tokens; siblings share a family and its dist; the spine is what a chain would have fed."""
    found = tree()
    assert [found.path(node) for node in (-1, 3, 5, 6)] == [[], [7, 2], [7, 1, 5], [8, 1, 5]]
    assert found.levels == [0, 0, 1, 1, 1, 2, 2]
    assert (found.depth, found.slots) == (3, [30, 11, 12, 9, 4])
    assert list(found.dist_places(0)) == [0, 0, 1, 1, 2, 3, 4]
    assert [found.reach(node) for node in (-1, 0, 1, 3, 4, 6)] == [3, 3, 3, 2, 3, 3]
    assert found.fed == 1
    assert [found.fed_along(told) for told in ([7, 1], [8, 1], [], [7])] == [1, 0, 0, 1]


def test_the_first_levels_of_a_tree_are_a_tree() -> None:
    """Nodes, families and slots of deeper levels are gone, the others as they were."""
    cut = tree().first(2)
    assert isinstance(cut, Tree)
    assert (cut.tokens, cut.parents, cut.slots) == (TOKENS[:5], PARENTS[:5], [30, 11, 12])
    assert (cut.depth, list(cut.dist_places(0))) == (2, [0, 0, 1, 1, 2])
    assert len(tree().first(0)) == 0 == tree().first(0).depth
    assert tree().first(9).tokens == TOKENS


def test_some_nodes_of_a_tree_are_a_tree_with_the_same_slots() -> None:
    """Families keep their numbers, so that each node's slot and dist is what it was; paths are as before."""
    sure = tree_of(TOKENS, PARENTS, SLOTS, FED, [0.5, 0.4, 0.3, 0.2, 0.1, 0.9, 0.8])
    cut = sure.only([0, 1, 4, 6])
    assert (cut.tokens, cut.parents, cut.levels) == ([7, 8, 1, 5], [-1, -1, 1, 2], [0, 0, 1, 2])
    assert (cut.slots, list(cut.dist_places(0))) == ([30, 11, 12, 9, 4], [0, 0, 2, 4])
    assert cut.sureness == [0.5, 0.4, 0.1, 0.8]
    assert (cut.path(3), cut.reach(0), cut.met(3)) == ([8, 1, 5], 1, [(2, 1), (1, 0), (1, 0)])
    assert (cut.fed, sure.only([0]).fed, sure.only([]).tokens) == (1, 1, [])
    assert sure.only([0, 1]).slots == [30]


def test_a_tree_tells_whose_turn_came() -> None:
    """All children of the places on the kept path, and that path's nodes were kept; nothing where nobody was sure."""
    sure = tree_of(TOKENS, PARENTS, SLOTS, FED, [0.5, 0.4, 0.3, 0.2, 0.1, 0.9, 0.8])
    assert sure.tried(-1) == [(0.5, False), (0.4, False)]
    assert sure.tried(2) == [(0.5, True), (0.4, False), (0.3, True), (0.2, False), (0.9, False)]
    assert sure.tried(6) == [(0.5, False), (0.4, True), (0.1, True), (0.8, True)]
    assert tree().tried(2) == []
    chain = Chain([1, 2, 3], sureness=[0.5, 0.4, 0.3])
    assert [chain.tried(last) for last in (-1, 0, 2)] == [
        [(0.5, False)],
        [(0.5, True), (0.4, False)],
        [(0.5, True), (0.4, True), (0.3, True)],
    ]


@pytest.mark.parametrize(
    ("wrong", "columns"),
    {
        "a node behind itself": {"parents": [-1, 1, 0, 0, 1, 2, 4]},
        "below −1": {"parents": [-2, -1, 0, 0, 1, 2, 4]},
        "not by level": {"parents": [-1, 0, -1, 0, 1, 2, 4]},
        "one slot for two families": {"slots": [30, 30, 11, 11, 11, 9, 4]},
        "two slots for one family": {"slots": [30, 31, 11, 11, 12, 9, 4]},
        "siblings that are one token": {"tokens": [7, 7, 1, 2, 1, 5, 5]},
    }.items(),
)
def test_what_is_no_tree_is_refused(wrong, columns) -> None:
    """Each fault by itself; the tree without it is one."""
    given_ = {"tokens": TOKENS, "parents": PARENTS, "slots": SLOTS} | columns
    with pytest.raises(ProtocolError):
        tree_of(given_["tokens"], given_["parents"], given_["slots"], FED)


def pipeline(depth=3, **fields) -> Pipeline:
    engine = EngineConfig(depth=depth, **{k: v for k, v in TREES[depth].items() if k.startswith("tree")})
    return Pipeline(
        make_verifier=lambda: Verifier(backend(TABLE), vocab_size=VOCAB, engine=engine),
        make_draft=lambda: draft_worker(engine.tree_shape),
        end=1000,
        depth=depth,
        **TREES[depth],
        **fields,
    )


def push_of_a_tree(asked: Pipeline, nodes: int = 1) -> Push:
    """The worker's answer to the first plan that lets a tree have so many nodes."""
    asked.submit("a", [1, 2, 3], 12 * nodes)
    for _ in range(40 * nodes):
        asked.engine.advance()
        if asked.draft.held:
            plan = asked.draft.held.popleft()
            for reply in asked.draft.worker.handle(plan):
                if len(reply.tokens) and plan.nodes.sum() >= nodes:
                    return reply
                asked.engine._drafts.receive(reply, 0.0)
        elif asked.verifier.held:
            asked.verifier.deliver(asked.engine)
    raise AssertionError("no tree is drafted")


@pytest.mark.parametrize(
    "damage",
    [
        lambda push: replace(push, parents=push.parents[::-1].copy()),
        lambda push: replace(push, slots=push.slots + 1),
        lambda push: replace(push, tokens=push.tokens * 0),
        lambda push: replace(push, tokens=push.tokens + VOCAB),
        lambda push: replace(push, sampled=~push.sampled),
        lambda push: replace(push, fed=push.fed[:-1]),
        lambda push: replace(push, chain_lengths=push.chain_lengths + 1),
        lambda push: replace(push, chain_lengths=-push.chain_lengths),
    ],
)
def test_a_push_that_breaks_the_protocol_costs_the_draft_worker_its_life(damage) -> None:
    """No state is changed by it; the request goes on without drafts, and nothing stays held."""
    asked = pipeline()
    push = push_of_a_tree(asked)
    with pytest.raises(ProtocolError):
        asked.engine._drafts.receive(damage(push), 0.0)
    asked.lose("draft")
    asked.settle()
    assert len(asked.tokens("a")) == 12
    assert asked.idle()


def test_a_family_wider_than_was_asked_for_costs_the_draft_worker_its_life() -> None:
    """Whoever counts by rank has no place for it. The tree has no more nodes or levels than it may have."""
    asked = pipeline(6, depth_policy="adaptive")
    widest = EngineConfig(depth=6, **{k: v for k, v in TREES[6].items() if k.startswith("tree")}).tree_shape.widest
    count = widest + 1
    push = push_of_a_tree(asked, count)
    wide = replace(
        push,
        chain_lengths=np.array([count], dtype=np.int32),
        tokens=np.arange(count, dtype=np.int32),
        parents=np.full(count, -1, dtype=np.int32),
        slots=np.full(count, push.slots[0], dtype=np.int32),
        fed=np.zeros(count, dtype=np.bool_),
        sampled=np.ones(count, dtype=np.bool_),
    )
    with pytest.raises(ProtocolError, match="family"):
        asked.engine._drafts.receive(wide, 0.0)


def test_a_verdict_names_the_last_kept_node_and_as_many_tokens_as_lead_to_it() -> None:
    """Others are refused, as are verdicts on trees that name none."""
    asked = pipeline()
    asked.submit("a", [1, 2, 3], 12)
    for _ in range(40):
        asked.engine.advance()
        if asked.verifier.held and len(getattr(asked.verifier.held[0], "parents", ())):
            break
        channel = asked.draft if asked.draft.held else asked.verifier
        channel.deliver(asked.engine)
    (verdict,) = asked.verifier.worker.handle(asked.verifier.held.popleft())
    assert isinstance(verdict, Verdict)
    current = asked.engine._round
    current.check(verdict, VOCAB)
    for wrong in (
        replace(verdict, last=verdict.last + 100),
        replace(verdict, last=np.full_like(verdict.last, -2)),
        replace(verdict, kept=verdict.kept + 1),
        replace(verdict, last=verdict.last[:0]),
    ):
        with pytest.raises(ProtocolError):
            current.check(wrong, VOCAB)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 60))
@settings(deadline=None, derandomize=True)
def test_a_static_shape_counts_what_grows(branching, room) -> None:
    """Nodes and places with children, level by level; `within` is the deepest that fits."""
    shape = static(tuple(branching))
    places, nodes = 1, 0
    for level, children in enumerate(branching, 1):
        assert shape.parents(level) == 1 + nodes
        places *= children
        nodes += places
        assert shape.nodes(level) == nodes
    fits = [level for level in range(len(branching) + 1) if shape.nodes(level) <= room]
    assert shape.within(len(branching), room) == max(fits)
