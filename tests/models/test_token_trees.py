"""Trees of tokens in one row: each node sees its own path, and the kept path becomes an ordinary row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_causal import CONFIGS, own_logits, paged, random_tokens, tiny

from specserve.models import HoldsTrees, Move, TokenTree, _memory
from specserve.models._stretches import Stretch, ragged

FAMILIES = sorted(CONFIGS)
PARENTS = np.array([-1, -1, -1, 0, 0, 1, 3, 3, 5, 8])
TABLES = [np.array([9, 3, 27, 14, 30, 2], dtype=np.int32), np.array([1, 8, 22, 16, 11, 5], dtype=np.int32)]


def close(found, expected) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def path_to(node: int) -> list[int]:
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, int(PARENTS[path[0]]))
    return path


def expected_at_nodes(family: str, text: np.ndarray, nodes: np.ndarray) -> torch.Tensor:
    """What the model itself says after the text and each node's path."""
    rows = [own_logits(tiny(family), np.concatenate([text, nodes[path_to(node)]]))[-1] for node in range(len(nodes))]
    return torch.stack(rows)


def tree_row(text: np.ndarray, nodes: np.ndarray, table: np.ndarray, fed: int) -> Stretch:
    """A row that feeds the text from `fed` on and the tree behind it; all of it shows logits."""
    tokens = np.concatenate([text[fed:], nodes])
    return Stretch(fed, tokens, table, len(tokens), tree=TokenTree(len(text), PARENTS))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_node_has_the_logits_of_its_own_path(family: str) -> None:
    """Two trees and a chain in one batch, one tree fed with its prompt, scattered blocks, garbage in the pages."""
    backend = paged(family)
    texts = [random_tokens(1, 9), random_tokens(2, 10)]
    nodes = [random_tokens(3, len(PARENTS)), random_tokens(4, len(PARENTS))]
    backend.forward(ragged([Stretch(0, texts[0][:-1], TABLES[0], 0)]))
    chain = random_tokens(5, 9)
    rows = [
        tree_row(texts[0], nodes[0], TABLES[0], 8),
        Stretch(0, chain, np.array([4, 6, 7]), 9),
        tree_row(texts[1], nodes[1], TABLES[1], 0),
    ]
    found = backend.forward(ragged(rows)).split([1 + len(PARENTS), 9, 10 + len(PARENTS)])
    close(found[0][1:], expected_at_nodes(family, texts[0], nodes[0]))
    close(found[1], own_logits(tiny(family), chain))
    close(found[2][:10], own_logits(tiny(family), texts[1]))
    close(found[2][10:], expected_at_nodes(family, texts[1], nodes[1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_may_grow_level_by_level(family: str) -> None:
    """Nodes that are fed later see those on their paths that were fed before, and no others."""
    backend, text, nodes = paged(family), random_tokens(1, 9), random_tokens(3, len(PARENTS))
    backend.forward(ragged([Stretch(0, text, TABLES[0], 0)]))
    found, tree = [], TokenTree(len(text), PARENTS)
    for begin, end in ((0, 3), (3, 6), (6, 9), (9, 10)):
        stretch = Stretch(len(text) + begin, nodes[begin:end], TABLES[0], end - begin, tree=tree)
        found.append(backend.forward(ragged([stretch])))
    close(torch.cat(found), expected_at_nodes(family, text, nodes))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_path_is_an_ordinary_row_once_it_is_moved(family: str) -> None:
    """After the move of nodes 1, 5, 8 what follows them has the logits of that text; unmoved, it has not."""
    text, nodes, more = random_tokens(1, 9), random_tokens(3, len(PARENTS)), random_tokens(6, 4)
    kept = [1, 5, 8]
    whole = np.concatenate([text, nodes[kept], more])
    found = []
    for moved in (True, False):
        backend = paged(family)
        assert isinstance(backend, HoldsTrees)
        backend.forward(ragged([tree_row(text, nodes, TABLES[0], 0)]))
        if moved:
            backend.move([Move(TABLES[0], len(text), [len(text) + node for node in kept])])
        found.append(backend.forward(ragged([Stretch(len(text) + len(kept), more, TABLES[0], len(more))])))
    close(found[0], own_logits(tiny(family), whole)[-len(more) :])
    assert (found[0] - found[1]).abs().max() > 0.01


def test_a_causal_mask_or_positions_in_pages_are_noticed() -> None:
    """The same nodes read as a chain, or at the positions of their pages, have other logits: the check can fail."""
    text, nodes = random_tokens(1, 9), random_tokens(3, len(PARENTS))
    expected = expected_at_nodes("llama", text, nodes)
    batch = ragged([tree_row(text, nodes, TABLES[0], 0)])
    as_chain = paged("llama").forward(replace(batch, trees={}))[len(text) :]
    backend = paged("llama")
    assert backend._flat is not None
    backend._flat = backend._native = None
    flat_run = backend._run
    backend._run = lambda tokens, _, wanted, store: flat_run(tokens, batch.positions, wanted, store)
    misplaced = backend.forward(batch)[len(text) :]
    assert min((found - expected).abs().max() for found in (as_chain, misplaced)) > 0.01


def test_a_batch_invariant_tree_has_the_bits_of_its_chains() -> None:
    """Every node's logits are bit for bit those of its path as a chain, also past a window."""
    for family in ("llama", "mistral_window"):
        text, nodes = random_tokens(1, 9), random_tokens(3, len(PARENTS))
        backend = paged(family)
        backend.make_batch_invariant()
        found = backend.forward(ragged([tree_row(text, nodes, TABLES[0], 0)]))[len(text) :]
        for node in range(len(nodes)):
            chain = np.concatenate([text, nodes[path_to(node)]])
            assert torch.equal(backend.forward(ragged([Stretch(0, chain, TABLES[1], 1)]))[0], found[node])


def test_a_tree_that_does_not_fit_into_memory_is_computed_in_parts() -> None:
    """Halves of a tree row are rows of the same tree."""
    backend, text, nodes = paged("llama"), random_tokens(1, 9), random_tokens(3, len(PARENTS))
    forward = backend.forward

    def tight(batch):
        if len(batch.tokens) > 4:
            raise torch.OutOfMemoryError("no room")
        return forward(batch)

    backend.forward = tight
    found = _memory.forward(backend, [tree_row(text, nodes, TABLES[0], 0)])
    close(found[len(text) :], expected_at_nodes("llama", text, nodes))
