"""How the draft worker grows trees: siblings, shapes, and what a push says of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, zip_longest

import numpy as np
import pytest
import torch
from table_backend import TableBackend
from worker_messages import Part, ints, opened, plan

from specserve.drafting import _trees
from specserve.drafting._trees import shares
from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import DenseDists, SparseDists, Workspace
from specserve.sampling import _kernels
from specserve.transport.messages import Failed, Push
from specserve.tree_shape import TreeShape

VOCAB = 9
CPU = torch.device("cpu")
STATIC = TreeShape((3, 2, 1), 3, 15)


def table(seed, scale) -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def grown(
    shape: TreeShape, parts, levels, *, nodes=(), seed=0, scale=2.0, notes_sureness=False, rules=(), **options
) -> Push:
    model = TableBackend(table(seed, scale))
    model.allocate(64, 4)
    space = Workspace(512, SparseDists(512, VOCAB, CPU), CPU, notes_sureness=notes_sureness)
    worker = DraftWorker(SmallModel(model, VOCAB), space, vocab_size=VOCAB, shape=shape)
    for part, rule in zip_longest(parts, rules):
        worker.handle(opened(part.row, **options | ({"rule": rule} if rule else {})))
    most = nodes or [shape.nodes(each) for each in levels]
    (reply,) = worker.handle(replace(plan(parts), levels=ints(levels), nodes=ints(most)))
    assert isinstance(reply, Push), reply
    return reply


def test_more_nodes_than_a_tree_may_have_fail_the_plan() -> None:
    """They would outgrow its slots. Levels and slots are those of the largest tree."""
    shape = TreeShape(None, 2, 4)
    with pytest.raises(AssertionError, match="at most 4 nodes, not 5"):
        grown(shape, [part(0, shape.parents(3))], [3], nodes=[5])


def part(row: int, slots: int) -> Part:
    return Part(row, 0, [1, 2], range(8 * row, 8 * row + 8), slots=range(20 * row, 20 * row + slots))


@pytest.mark.parametrize("store", [SparseDists, DenseDists])
def test_siblings_are_drawn_without_replacement(store) -> None:
    """Pairs of [.5 .3 .2] have the law of two draws of which the second leaves out the first; then nothing is left."""
    dist = torch.tensor([0.5, 0.0, 0.3, 0.2])
    space = Workspace(1, store(1, 4, CPU), CPU)
    space.put(np.array([0]), dist[None])
    rows = 20_000
    noise = torch.rand(rows, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slots = np.zeros(rows, dtype=np.int64)
    drawn = space.draw_siblings(slots, noise)
    assert torch.equal(drawn[:, 0], space.draw(slots, noise[:, 0]))
    assert (drawn[:, 3] == -1).all()
    for first, second in permutations((0, 2, 3), 2):
        share = ((drawn[:, 0] == first) & (drawn[:, 1] == second)).double().mean()
        expected = dist[first] * dist[second] / (1 - dist[first])
        assert abs(share - expected) < 4 * (expected * (1 - expected) / rows) ** 0.5


def test_a_push_describes_its_trees() -> None:
    """Level by level, a slot and a row of dists for each family, all nodes fed but those of the last level."""
    push = grown(STATIC, [part(0, 10), part(1, 4), Part(2, 0, [3], [30])], [3, 2, 0])
    assert push.chain_lengths.tolist() == [15, 9, 0]
    assert push.parents[:15].tolist() == [-1, -1, -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8]
    assert push.slots[:15].tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]
    assert push.slots[15:].tolist() == [20, 20, 20, 21, 21, 22, 22, 23, 23]
    assert push.fed.tolist() == [True] * 9 + [False] * 6 + [True] * 3 + [False] * 6
    assert push.dists.rows.shape == (10 + 4, VOCAB * 6)
    families = push.slots.tolist()
    pairs = set(zip(families, push.tokens.tolist(), strict=True))
    assert len(pairs) == len(families)


def test_dists_are_shipped_of_levels_that_only_others_have_drawn_beside() -> None:
    """One request samples a level, another picks two by argmax: every row that is shipped has mass."""
    push = grown(STATIC, [part(0, 1), part(1, 4)], [1, 2], temperature=1.0, rules=["rejection", "exact"])
    assert len(push.dists.rows) == 1 + 4
    assert push.dists.rows.any(axis=1).all()


@pytest.mark.parametrize("rules", [("exact", "rejection"), ("rejection", "exact"), ("exact", "coupled")])
def test_a_row_that_is_fed_only_decides_nothing_of_the_dists(rules) -> None:
    """A prompt's end beside a tree: dists are shipped where the tree is drawn, with mass, and nowhere else."""
    push = grown(STATIC, [part(0, 10), part(1, 0)], [3, 0], temperature=1.0, rules=rules)
    assert push.chain_lengths.tolist() == [15, 0]
    assert len(push.dists.rows) == (10 if rules[0] == "rejection" else 0)
    assert push.dists.rows.any(axis=1).all()


@pytest.mark.parametrize("shape", [STATIC, TreeShape(None, 3, 6)], ids=["static", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_push_says_how_sure_the_draft_is_of_each_node(shape, temperature) -> None:
    """Greedy: its probability behind its parent. Drawn: the largest one's root, of what elder siblings left of it."""
    parts = [Part(0, 0, [1, 2], list(range(10)), slots=list(range(shape.parents(3))))]
    push = grown(shape, parts, [3], temperature=temperature, notes_sureness=True)
    tokens, parents = push.tokens.tolist(), push.parents.tolist()
    assert len(push.sureness) == len(tokens) == shape.nodes(3)
    for node, token in enumerate(tokens):
        path, above = [], parents[node]
        while above >= 0:
            path, above = [tokens[above], *path], parents[above]
        dist = table(0, 2.0)[*[1, 2, *path][-2:]].softmax(-1)
        elder = parents[:node].count(parents[node])
        overlap = float(dist.max()) ** 0.5
        wanted = overlap * (1 - overlap) ** elder if temperature else float(dist[token])
        assert push.sureness[node] == pytest.approx(wanted, rel=2e-3)
    assert len(grown(shape, parts, [3]).sureness) == 0


@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_rules_without_dists_get_ids_only(rule) -> None:
    """Nothing is shipped beside the nodes; siblings are different tokens."""
    push = grown(STATIC, [part(0, 10)], [3], rule=rule)
    assert not len(push.dists.rows)
    assert len(set(zip(push.slots.tolist(), push.tokens.tolist(), strict=True))) == 15


def test_the_first_of_each_level_is_a_chains_token() -> None:
    """Growing sideways changes nothing in the path of first children, under any way of picking."""
    for rule in ("rejection", "exact", "coupled"):
        wide = grown(STATIC, [part(0, 10)], [3], rule=rule, seed=3)
        chain = grown(TreeShape((1, 1, 1), 1, 3), [part(0, 3)], [3], rule=rule, seed=3)
        assert wide.tokens[[0, 3, 9]].tolist() == chain.tokens.tolist()


@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
def test_a_dynamic_tree_keeps_to_its_budget(scale) -> None:
    """Never more nodes, parents or children than allowed; a sure draft goes deep, an unsure one wide."""
    shape = TreeShape(None, 3, 8)
    push = grown(shape, [part(0, shape.parents(5))], [5], temperature=0, scale=scale)
    parents = push.parents.tolist()
    levels: list[int] = []
    for parent in parents:
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
    assert len(parents) == 8
    assert max(parents.count(parent) for parent in parents) <= 3
    assert all(len({p for p, at in zip(parents, levels, strict=True) if at == level}) <= 3 for level in levels)
    assert (max(levels) >= 3) if scale == 8.0 else (levels.count(0) == 3)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("shape", [STATIC, TreeShape(None, 3, 8)], ids=["static", "dynamic"])
def test_each_tree_has_the_nodes_that_it_was_given(shape, temperature) -> None:
    """Of a batch with every size: exactly so many, by the shape's own widths, in no more slots than were leased."""
    sizes = list(range(1, shape.nodes(3) + 1))
    parts = [part(row, shape.within_nodes(size).parents(min(3, size))) for row, size in enumerate(sizes)]
    parts = [replace(each, table=range(4 * row, 4 * row + 4)) for row, each in enumerate(parts)]
    levels = [min(3, size) for size in sizes]
    push = grown(shape, parts, levels, nodes=sizes, temperature=temperature)
    assert push.chain_lengths.tolist() == sizes
    at = 0
    for size, deepest in zip(sizes, levels, strict=True):
        parents = push.parents[at : at + size].tolist()
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            assert parents.count(parent) <= shape.children(depths[-1])
        assert max(depths) < deepest
        at += size


@pytest.mark.parametrize("compiled", [True, False])
def test_likely_children_are_worth_their_probabilities(monkeypatch, compiled) -> None:
    """With a kernel and without. What is not allowed is worth nothing, nor is a row with NaN, +inf, or nothing."""
    if not compiled:
        monkeypatch.setattr(_kernels, "exp_sums", lambda *_: None)
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(3)) * 4
    logits[1, 2:] = -torch.inf
    logits[2, 7], logits[3, 8], logits[4] = torch.nan, torch.inf, -torch.inf
    best = _trees._best(logits, 4, 1000)
    found = torch.from_numpy(_trees._probabilities(logits, best, 4))
    sound = [0, 1, 5]
    assert torch.allclose(found[sound], logits[sound].softmax(-1).topk(4).values, rtol=1e-5)
    assert not found[[2, 3, 4]].any()
    assert best.sound.tolist() == [True, True, False, False, False, True]


def test_shares_go_to_depth_where_the_draft_is_sure_and_to_width_where_it_is_not() -> None:
    """Of 4 nodes with 3 levels to come: one child of 0.95, and all three of a flat place."""
    assert shares([[0.95, 0.03, 0.02]], 4, 1, 3) == [1]
    assert shares([[0.2, 0.19, 0.18]], 4, 1, 3) == [3]
    assert shares([[0.5, 0.1], [0.3, 0.25]], 3, 2, 0) == [1, 2]
    assert shares([[0.5, 0.1], [0.0, 0.0]], 9, 2, 2) == [2, 0]
    assert shares([[0.5]], 0, 1, 1) == [0]


def test_a_tree_that_was_not_leased_is_refused() -> None:
    """Slots for another tree, and a tree for a worker that drafts chains."""
    for shape, slots in ((STATIC, 9), (None, 3)):
        space = Workspace(64, SparseDists(64, VOCAB, CPU), CPU)
        model = TableBackend(torch.zeros(VOCAB, VOCAB, VOCAB))
        model.allocate(64, 4)
        worker = DraftWorker(SmallModel(model, VOCAB), space, vocab_size=VOCAB, shape=shape)
        worker.handle(opened(0))
        (reply,) = worker.handle(replace(plan([part(0, slots)]), levels=ints([3]), nodes=ints([15])))
        assert isinstance(reply, Failed)
        assert reply.rows.tolist() == [0]
