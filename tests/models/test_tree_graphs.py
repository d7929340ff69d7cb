"""Recorded steps with trees say what eager ones say: any tree through one step, chains beside it, none left over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pretend_device import PretendDevice, moved
from taped import TapeRecorder
from test_step_graphs import garbage, torch_layers  # noqa: F401
from tiny_causal import BLOCK, BLOCKS, CONFIGS, paged, random_tokens, tiny

from specserve.models import Move, RaggedBatch, TokenTree
from specserve.models._pages import LayerLayout
from specserve.models._recorder import PlainRecorder
from specserve.models._row_groups import _hidden_in_tree
from specserve.models._static_plan import StaticInputs, StaticPlan
from specserve.models._static_trees import StaticTrees
from specserve.models._step_graphs import graph_bytes
from specserve.models._step_shapes import StepShape
from specserve.models._stretches import Stretch, ragged
from specserve.models.paged_transformers import PagedTransformers

NODES = 9
SHAPES = (StepShape(2, 4, 48, 4), StepShape(4, 10, 48, 10, NODES))
TABLES = [np.array(blocks, dtype=np.int32) for blocks in ([9, 3, 27, 14, 30, 2, 8], [1, 22, 16, 11, 5, 33, 12])]
THIRD = np.array([4, 6, 7, 10, 13, 15], dtype=np.int32)


def recorded(family: str, recorder=None, shapes=SHAPES) -> PagedTransformers:
    """A backend with the weights of `tiny(family)` and recorded steps."""
    backend = PagedTransformers(tiny(family), None)
    backend.plan_steps(shapes)
    backend.allocate(BLOCKS, BLOCK)
    assert len(list(backend.record_with(recorder or PlainRecorder()))) == len(shapes)
    garbage(backend)
    return backend


def random_tree(chance: np.random.Generator, count: int) -> np.ndarray:
    """Parents of so many nodes: now and then a chain, else any."""
    if chance.random() < 0.2:
        return np.arange(-1, count - 1)
    return np.array([chance.integers(-1, node) for node in range(count)], dtype=np.int64)


def rounds(seed: int, count: int = 6) -> list[RaggedBatch]:
    """Prompts; then verifications of some of three rows in any order, each with another tree, a chain or a token,
    behind which the path that seemed best, or nothing, is kept."""
    chance = np.random.default_rng(seed)
    tables = [*TABLES, THIRD]
    texts = [chance.integers(3, 97, length) for length in (9, 6, 4)]
    made = [ragged([Stretch(0, text[:-1], table, 1) for text, table in zip(texts, tables, strict=True)])]
    for number in range(count):
        rows = []
        for row in chance.permutation(3)[: chance.integers(1, 4)]:
            drafted = chance.integers(3, 97, 0 if (number + row) % 4 == 3 else chance.integers(1, NODES + 1))
            tokens = np.concatenate([texts[row][-1:], drafted])
            tree = TokenTree(len(texts[row]), random_tree(chance, len(drafted)))
            kind = None if len(drafted) == 0 or chance.random() < 0.25 else tree
            rows.append(Stretch(len(texts[row]) - 1, tokens, tables[row], len(tokens), tree=kind))
        made.append(ragged(rows))
        for row in range(3):
            if chance.random() < 0.5 and len(texts[row]) < 12:  # the token behind it: what was written there is void
                texts[row] = np.append(texts[row], chance.integers(3, 97))
                made.append(ragged([Stretch(len(texts[row]) - 2, texts[row][-2:-1], tables[row], 1)]))
    return made


def compared(backend: PagedTransformers, eager: PagedTransformers, batches: list[RaggedBatch]) -> None:
    for batch in batches:
        torch.testing.assert_close(backend.forward(batch), eager.forward(batch), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_any_tree_through_the_same_step_says_what_its_eager_step_says(family: str) -> None:
    """Trees, chains and lone tokens in one batch, rows in any order, one batch after the other, also past a window."""
    for seed in range(4):
        backend, batches = recorded(family), rounds(seed)
        compared(backend, paged(family), batches)
        assert sum(len(batch.trees) for batch in batches) >= 4
        assert (backend.graphs.replayed, backend.graphs.eager) == (len(batches), 0)


@pytest.mark.usefixtures("torch_layers")
@pytest.mark.parametrize("family", ["llama", "mistral_window", "gemma2_softcap"])
def test_nothing_but_buffers_changes_between_trees(family: str) -> None:
    """The same from a tape of operators: no tree is part of what was recorded."""
    backend, batches = recorded(family, TapeRecorder()), rounds(5)
    compared(backend, paged(family), batches)
    assert backend.graphs.replayed == len(batches)


def tree_batch(parents: list[int], *, start: int = 8) -> RaggedBatch:
    """One row: a token and a tree behind it."""
    tree = TokenTree(start + 1, np.array(parents, dtype=np.int64))
    return ragged([Stretch(start, random_tokens(7, len(parents) + 1), TABLES[0], len(parents) + 1, tree=tree)])


def test_a_mask_of_the_tree_before_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where paths are not written anew the second tree has other logits; and so has a chain behind a tree."""
    prompt = ragged([Stretch(0, random_tokens(1, 8), TABLES[0], 1)])
    fan, comb = tree_batch([-1, -1, -1, -1]), tree_batch([-1, 0, -1, 2])
    for second in (comb, replace(fan, trees={})):
        backend, eager = recorded("llama", shapes=SHAPES[1:]), paged("llama")
        compared(backend, eager, [prompt, fan, second, fan])
        with monkeypatch.context() as patch:
            patch.setattr(StaticTrees, "fill", lambda *_: None)
            stale = backend.forward(second)
        assert (stale - eager.forward(second)).abs().max() > 0.01
        assert backend.graphs.eager == 0


def test_a_tree_may_grow_level_by_level() -> None:
    """A draft's nodes are fed a level at a time and see those on their paths that were fed before."""
    parents = np.array([-1, -1, -1, 0, 0, 1, 3, 3, 5])
    text, nodes, tree = random_tokens(1, 9), random_tokens(3, NODES), TokenTree(9, parents)
    for family in sorted(CONFIGS):
        backend, eager = recorded(family, shapes=(StepShape(2, 3, 48, 3, NODES),)), paged(family)
        batches = [ragged([Stretch(0, text, TABLES[0], 1)])]
        for begin, end in ((0, 3), (3, 6), (6, 9)):
            batches.append(ragged([Stretch(9 + begin, nodes[begin:end], TABLES[0], end - begin, tree=tree)]))
        compared(backend, eager, batches)
        assert (backend.graphs.replayed, backend.graphs.eager) == (3, 1)


def test_a_kept_path_is_an_ordinary_row_once_it_is_moved() -> None:
    """Nodes 1 and 3 of a replayed tree, and what follows them, as the eager backend has it."""
    backend, eager = recorded("llama"), paged("llama")
    batches = [ragged([Stretch(0, random_tokens(1, 8), TABLES[0], 1)]), tree_batch([-1, -1, 0, 1, 2])]
    compared(backend, eager, batches)
    for each in (backend, eager):
        each.move([Move(TABLES[0], 9, [10, 12])])
    compared(backend, eager, [ragged([Stretch(11, random_tokens(2, 3), TABLES[0], 3)])])
    assert backend.graphs.eager == 0


def test_a_row_that_went_wrong_spares_trees() -> None:
    """Not a number in one row's pages stays in its own logits, padding notwithstanding; twice."""
    backend, eager = recorded("llama"), paged("llama")
    for pages in (backend.pages, eager.pages):
        pages.values[0][THIRD[0] * BLOCK] = float("nan")
    tree = TokenTree(1, np.array([-1, -1, 0]))
    sound = Stretch(0, random_tokens(1, 4), TABLES[0], 4, tree=tree)
    batch = ragged([Stretch(1, random_tokens(2, 2), THIRD, 2), sound])
    for _ in range(2):
        logits = backend.forward(batch)
        assert logits[:2].isnan().all()
        torch.testing.assert_close(logits[2:], eager.forward(batch)[2:], atol=2e-5, rtol=2e-5)
    assert (backend.graphs.replayed, backend.graphs.eager) == (2, 0)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("nodes", [1, 63, 64, 65, 130])
def test_paths_of_large_trees_are_those_of_the_eager_mask(nodes: int, window: int | None) -> None:
    """By themselves, for trees of any size up to the shape's, where words end; the second row is a chain."""
    shape = StepShape(2, nodes + 2, 160, nodes + 2, nodes)
    words = torch.zeros(StaticInputs.size(shape, BLOCK), dtype=torch.int64)
    inputs = StaticInputs.within(words, shape, BLOCK)
    chance = np.random.default_rng(nodes)
    for count in sorted({1, nodes // 2 + 1, nodes}):
        tree = TokenTree(20, random_tree(chance, count))
        table = np.arange(40, dtype=np.int32)
        rows = [Stretch(18, np.zeros(2 + count), table, 1, tree=tree), Stretch(3, np.zeros(2), table, 1)]
        inputs.fill(ragged(rows), BLOCKS)
        plan = StaticPlan(shape, inputs, BLOCK, BLOCKS * BLOCK, torch.float32)
        assert plan.packed() is None
        (group,) = plan.groups(window, 1)
        found = (group.mask[:, 0] < 0).numpy()
        queries, keys = np.arange(18, 20 + count), np.arange(160)
        assert (found[0, -len(queries) :] == _hidden_in_tree(tree, queries, keys, window)).all()
        chain = np.arange(3, 5)[:, None]
        seen = (keys <= chain) if window is None else (keys <= chain) & (keys > chain - window)
        assert (found[1, -2:] == ~seen).all()


def test_a_replayed_tree_is_one_transfer_and_no_look() -> None:
    """On a device that is not there."""
    eager, batches = paged("mistral_window"), rounds(2)
    with PretendDevice() as device:
        backend = PagedTransformers(moved(tiny("mistral_window")), None)
        backend.plan_steps(SHAPES)
        backend.allocate(BLOCKS, BLOCK)
        assert list(backend.record_with(PlainRecorder()))
        for batch in batches:
            device.looks.clear()
            device.waits.clear()
            before = device.sent
            found = backend.forward(batch)
            assert not device.looks
            assert not device.waits
            assert device.sent == before + 1
            torch.testing.assert_close(found.as_subclass(torch.Tensor), eager.forward(batch), atol=2e-5, rtol=2e-5)
        assert backend.graphs.replayed == len(batches)


def test_trees_take_memory_of_their_own() -> None:
    """What tells paths is written for each query, and read for each of its keys."""
    layouts = [LayerLayout(2, 8, 8, torch.float32, None)]

    def taken(nodes: int) -> int:
        shapes = [StepShape(4, 10, 1024, 10, nodes)]
        return graph_bytes(shapes, layouts, BLOCK, vocab_size=97, heads=4, width=48, itemsize=4)

    assert taken(9) >= taken(0) + 3 * 8 * 40 * 1024
    assert taken(200) > taken(9)
