"""Which steps are recorded, and by which of them a batch is computed.

A recorded step has one shape for ever, so a batch is padded to the next one that holds it, and what none holds is
computed eagerly, as it is. Rows are rows: a prompt's last tokens, a verification and a catching-up draft are all some
tokens behind others, so what decides is how many rows there are, how long the longest is and how far it reaches. Trees
need a step with places for their nodes, which reads a mask and so costs more: there are some where trees are drafted,
and chains take the same ones there, as a chain is a tree without branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specserve.config import EngineConfig
from specserve.models import RaggedBatch

Role = Literal["target", "draft"]

_SHORTEST_KEYS = 256
_MOST_POSITIONS = 512
"""Of a recorded step: beyond, products take longer than it takes to launch them, and nothing is gained."""

_MOST_KEYS = 32_768
"""Positions that a recorded step reads, all rows together: it reads as many whatever its batch has, and beyond so many
that costs more than launches do."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one recorded step holds: rows of up to `queries` tokens that end at position `keys` at most.

    Each row has `shown` places for logits; a batch may use the places of all its rows as it likes. nodes: how many of a
    row's last positions may be nodes of its tree, those of earlier forwards included; with 0 there are no trees. head:
    it is one of a `DraftHead`, whose tokens come with states and whose rows begin at origins.
    """

    rows: int
    queries: int
    keys: int
    shown: int
    nodes: int = 0
    head: bool = False

    @property
    def positions(self) -> int:
        """Positions that are computed, real or not."""
        return self.rows * self.queries

    @property
    def logits(self) -> int:
        """Positions whose logits are computed."""
        return self.rows * self.shown

    def width(self, block_tokens: int) -> int:
        """Blocks in a row's table."""
        return -(-self.keys // block_tokens)

    def holds(self, extent: Extent) -> bool:
        """Whether a batch of this extent can be padded to this shape."""
        return (
            extent.rows <= self.rows
            and extent.queries <= self.queries
            and extent.keys <= self.keys
            and extent.wanted <= self.logits
            and extent.nodes <= self.nodes
        )


@dataclass(frozen=True, slots=True)
class Extent:
    """What of a batch decides which step computes it: rows, the longest one, the furthest end, logits wanted, and the
    nodes of the largest tree.
    """

    rows: int
    queries: int
    keys: int
    wanted: int
    nodes: int

    @staticmethod
    def of(batch: RaggedBatch) -> Extent:
        """The extent of a batch."""
        return Extent(
            len(batch.offsets) - 1,
            int(np.diff(batch.offsets).max()),
            int(batch.positions.max()) + 1,
            len(batch.wanted),
            max((len(batch.tree_of(row).parents) for row in batch.trees), default=0),
        )


def dispatched(batch: RaggedBatch, shapes: Sequence[StepShape]) -> StepShape | None:
    """The first of these shapes that holds the batch; None where it is to be computed eagerly.

    shapes are in order of what they cost.
    """
    extent = Extent.of(batch)
    return next((shape for shape in shapes if shape.holds(extent)), None)


def by_cost(shapes: Iterable[StepShape]) -> tuple[StepShape, ...]:
    """The order in which `dispatched` looks: positions cost more than keys, keys more than masks, these than logits."""
    return tuple(
        sorted(
            shapes,
            key=lambda shape: (shape.positions, shape.rows * shape.keys, shape.nodes, shape.logits, shape.rows),
        )
    )


def planned(role: Role, engine: EngineConfig, context_length: int) -> tuple[StepShape, ...]:
    """The steps of a worker that are worth recording, each once, by cost.

    A target decodes, and verifies `depth` drafted tokens; each position shows logits. A draft decodes, and catches up
    by one token or two after a verdict, by depth + 1 after more; a row's last position shows logits. Where trees are
    drafted, a target verifies whole ones and such as are no larger than a chain, and a draft reads each level at once.
    Rows come in powers of two up to the most there may be, contexts likewise; a lone row has a step for every context.
    """
    if role == "target":
        kinds, most_rows = _verifying(engine), engine.max_requests
    else:
        kinds, most_rows = _drafting(engine), engine.max_requests * (1 + engine.most_outcomes)
    return by_cost(
        StepShape(rows, queries, keys, shown, nodes)
        for queries, shown, nodes in kinds
        for rows in doubling(1, most_rows)
        for keys in doubling(_SHORTEST_KEYS, context_length)
        if rows * queries <= _MOST_POSITIONS and (rows == 1 or rows * keys <= _MOST_KEYS)
    )


def _verifying(engine: EngineConfig) -> set[tuple[int, int, int]]:
    """Queries, places for logits and nodes of a target's rows."""
    verified, shape = engine.depth + 1, engine.tree_shape
    if shape is None:
        return {(1, 1, 0), (verified, verified, 0)}
    nodes = shape.nodes(engine.depth)
    return {(1, 1, 0), (verified, verified, engine.depth), (nodes + 1, nodes + 1, nodes)}


def _drafting(engine: EngineConfig) -> set[tuple[int, int, int]]:
    """The same of a draft's rows."""
    feeds, shape = {(1, 1, 0), (2, 1, 0), (engine.depth + 1, 1, 0)}, engine.tree_shape
    if shape is None:
        return feeds
    nodes = shape.parents(engine.depth) - 1  # all that it reads but the root, which is fed
    levels = {min(shape.places(level), nodes) for level in range(1, engine.depth)}
    return feeds | {(places, places, nodes) for places in levels}


def doubling(first: int, last: int) -> Iterator[int]:
    """first, 2 first, 4 first, … below last, and last; last alone where it is no more than first."""
    while first < last:
        yield first
        first *= 2
    yield last
