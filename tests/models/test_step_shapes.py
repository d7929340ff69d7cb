"""Which batch is computed by which recorded step: rules of dispatch, without a model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_causal import ragged, random_tokens

from specserve.config import EngineConfig
from specserve.models import TokenTree
from specserve.models._step_shapes import Extent, StepShape, by_cost, dispatched, doubling, planned

DEPTH = 3
TARGET = planned("target", EngineConfig(depth=DEPTH, max_requests=8, max_batch_tokens=64), 1024)
DRAFT = planned("draft", EngineConfig(depth=DEPTH, max_requests=8, outcomes=0), 1024)
BLOCKS = list(range(70))


def batch(*lengths: int, start: int = 20, wanted: int | None = None):
    """Rows of so many tokens each; all show logits, or each row's last `wanted` ones."""
    found = ragged([(random_tokens(row, length), start, BLOCKS) for row, length in enumerate(lengths)])
    if wanted is None:
        return found
    ends = found.offsets[1:]
    keep = np.concatenate([np.arange(end - wanted, end) for end in ends])
    return type(found)(found.tokens, found.positions, found.offsets, found.tables, keep)


def kind(shape: StepShape | None) -> tuple[int, int] | None:
    return None if shape is None else (shape.rows, shape.queries)


def test_a_draft_step_takes_the_next_number_of_rows() -> None:
    """One token a row: 1, 2, 4 and 8 rows are recorded, and 9 are not."""
    found = [kind(dispatched(batch(*[1] * rows), DRAFT)) for rows in (1, 2, 3, 4, 5, 8, 9)]
    assert found == [(1, 1), (2, 1), (4, 1), (4, 1), (8, 1), (8, 1), None]


def test_verifications_of_one_depth_are_replayed() -> None:
    """Four rows of depth 3: 16 tokens in 4 rows of 4."""
    assert kind(dispatched(batch(4, 4, 4, 4), TARGET)) == (4, 4)


def test_a_chunk_of_a_prompt_among_them_makes_the_round_eager() -> None:
    """Three rows of 4 and a chunk of 9: no step has rows of 9."""
    assert dispatched(batch(4, 4, 4, 9), TARGET) is None


def test_a_chunk_as_long_as_a_verification_is_one() -> None:
    """By arithmetic it is uniform, and here it is: a row is some tokens behind others, whatever they are for."""
    assert kind(dispatched(batch(4, 4, 4, 4, 4), TARGET)) == (8, 4)
    assert kind(dispatched(batch(4, start=0), TARGET)) == (1, 4)


def test_rows_with_fewer_drafts_are_padded() -> None:
    """15 tokens are not 4 rows of 4, and take that step anyway; a plain row beside a verification too."""
    assert kind(dispatched(batch(4, 4, 3, 4), TARGET)) == (4, 4)
    assert kind(dispatched(batch(4, 1), TARGET)) == (2, 4)
    assert kind(dispatched(batch(1, 1), TARGET)) == (2, 1)


def test_a_draft_catches_up_in_steps_of_its_own() -> None:
    """By two tokens after a full acceptance, by depth + 1 at most, each row showing its last one."""
    assert kind(dispatched(batch(1, 2, wanted=1), DRAFT)) == (2, 2)
    assert kind(dispatched(batch(1, 3, wanted=1), DRAFT)) == (2, 4)
    assert dispatched(batch(5, wanted=1), DRAFT) is None


def test_more_logits_than_a_step_shows_are_eager() -> None:
    """A draft's step shows one position of each row; the places of all rows may be used by some."""
    assert dispatched(batch(3, 3, 3), DRAFT) is None
    assert kind(dispatched(batch(3, 3), DRAFT)) == (8, 4)
    assert kind(dispatched(batch(2, wanted=2), planned("target", EngineConfig(depth=1), 512))) == (1, 2)


def test_the_context_is_the_smallest_that_reaches_far_enough() -> None:
    """256, 512, 1024; a row that ends exactly there still fits."""
    ends = {end: dispatched(batch(1, start=end - 1), TARGET) for end in (1, 256, 257, 512, 1024)}
    assert {end: shape.keys for end, shape in ends.items() if shape} == {
        1: 256,
        256: 256,
        257: 512,
        512: 512,
        1024: 1024,
    }
    assert dispatched(batch(1, start=1024), TARGET) is None


def with_tree(plain, tree: TokenTree, row: int = 0):
    return replace(plain, trees={row: tree})


def test_trees_are_eager_where_chains_are_drafted() -> None:
    """Their nodes see their own paths only, and no step there can tell them."""
    plain = batch(4)
    assert dispatched(plain, TARGET) is not None
    assert dispatched(with_tree(plain, TokenTree(21, np.array([-1, -1, 0]))), TARGET) is None


GROWN = EngineConfig(depth=DEPTH, max_requests=8, max_batch_tokens=128, outcomes=0, tree="dynamic", tree_nodes=7)


def test_a_tree_takes_the_step_for_as_many_nodes() -> None:
    """Of depth 3 and up to 7 nodes: steps of 4 and of 8 positions a row, with places for 3 and for 7 nodes. Chains
    take them too, and a plain row beside a tree."""
    shapes = planned("target", GROWN, 256)
    assert {(shape.queries, shape.shown, shape.nodes) for shape in shapes} == {(1, 1, 0), (4, 4, 3), (8, 8, 7)}

    def taken(plain, count: int) -> tuple[int, int] | None:
        return kind(dispatched(with_tree(plain, TokenTree(21, np.full(count, -1)), len(plain.offsets) - 2), shapes))

    assert [taken(batch(1 + count), count) for count in (1, 3, 4, 7, 8)] == [(1, 4), (1, 4), (1, 8), (1, 8), None]
    assert taken(batch(1, 4, 4), 3) == (4, 4)
    assert kind(dispatched(batch(4, 2), shapes)) == (2, 4)
    assert kind(dispatched(batch(1, 1), shapes)) == (2, 1)


def test_nodes_that_are_no_part_of_a_batch_do_not_count() -> None:
    """A tree that is fed in parts is as large as what there is of it so far, earlier parts included."""
    tree = TokenTree(20, np.full(9, -1))
    assert [Extent.of(with_tree(batch(2, start=start), tree)).nodes for start in (20, 23, 27, 18, 10)] == [
        2,
        5,
        9,
        0,
        0,
    ]
    assert Extent.of(batch(2)).nodes == 0


def test_a_draft_reads_each_level_of_a_tree_at_once() -> None:
    """Dynamic trees have levels of up to `tree_width` places, of static ones each level has its own number; the last
    level is never read, and all that is read before may be on a path."""

    def kinds(**engine) -> set[tuple[int, int, int]]:
        made = planned("draft", EngineConfig(max_requests=2, outcomes=0, **engine), 256)
        return {(shape.queries, shape.shown, shape.nodes) for shape in made}

    chains = {(1, 1, 0), (2, 1, 0), (5, 1, 0)}
    assert kinds(depth=4) == chains
    assert kinds(depth=4, tree="dynamic", tree_nodes=30, tree_width=3) == chains | {(3, 3, 9)}
    assert kinds(depth=4, tree=(3, 2)) == chains | {(3, 3, 15), (6, 6, 15)}
    assert kinds(depth=1, tree=(3,)) == {(1, 1, 0), (2, 1, 0)}
    assert kinds(depth=2, tree=(3, 2)) == {(1, 1, 0), (2, 1, 0), (3, 1, 0), (3, 3, 3)}


def test_nothing_recorded_is_all_eager() -> None:
    """As before a recording is complete, and where it failed."""
    assert dispatched(batch(1), ()) is None


@pytest.mark.parametrize("shapes", [TARGET, DRAFT])
def test_no_cheaper_step_would_hold_the_batch(shapes: tuple[StepShape, ...]) -> None:
    """Over many batches: what is chosen holds the batch, and nothing with fewer positions does."""
    chance = np.random.default_rng(0)
    for _ in range(200):
        lengths = chance.integers(1, 6, chance.integers(1, 10)).tolist()
        made = batch(*lengths, start=int(chance.integers(0, 1020)), wanted=1)
        found, extent = dispatched(made, shapes), Extent.of(made)
        holding = [shape for shape in shapes if shape.holds(extent)]
        assert (found is None) == (not holding)
        if found is not None:
            assert found in holding
            assert found.positions == min(shape.positions for shape in holding)


def test_what_is_planned_is_bounded() -> None:
    """Not above 512 positions, nor where all rows together read more than 32,768; a lone row at every context."""
    engine = EngineConfig(depth=4, max_requests=128, max_batch_tokens=1024)
    for role in ("target", "draft"):
        shapes = planned(role, engine, 131_072)
        assert shapes == by_cost(set(shapes))
        assert all(shape.positions <= 512 for shape in shapes)
        assert all(shape.rows == 1 or shape.rows * shape.keys <= 32_768 for shape in shapes)
        assert any(shape.rows == 1 and shape.keys == 131_072 for shape in shapes)
        assert len(shapes) < 160


def test_plain_decoding_needs_one_kind() -> None:
    """At depth 0 rows have one token, and a context below the smallest class is its own."""
    engine = EngineConfig(depth=0, max_requests=2)
    assert planned("target", engine, 64) == (StepShape(1, 1, 64, 1), StepShape(2, 1, 64, 1))
    assert {(shape.queries, shape.keys) for shape in planned("target", engine, 300)} == {(1, 256), (1, 300)}


def test_doubling_ends_with_the_last() -> None:
    """Which is there once, even when it is a power itself."""
    assert list(doubling(1, 8)) == [1, 2, 4, 8]
    assert list(doubling(1, 9)) == [1, 2, 4, 8, 9]
    assert list(doubling(256, 64)) == [64]
