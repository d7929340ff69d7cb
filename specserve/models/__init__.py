"""ONE FILE PER BACKEND: a model on paged KV that writes tokens at given positions and shows logits where asked.

A backend knows nothing of requests, drafts or rules: rows, positions and block tables come with every batch, and
what lies past a row's last position in its blocks is void by definition. Files that begin with an underscore are
parts, not choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from specserve.models._step_shapes import StepShape

NOT_CHOICES = frozenset({"loading", "threads", "trained_draft", "vocabulary"})


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Several continuations of one row as one tree: node i stands at position root + i of the row's pages.

    parents int64 [N]: the node before each one, which has a smaller number, or −1 where that is position root − 1.
    Nodes past the row's last position are no part of a batch.
    """

    root: int
    parents: npt.NDArray[np.int64]

    def levels(self) -> npt.NDArray[np.int64]:
        """int64 [N]: how many nodes come before each one on its path."""
        levels = np.zeros(len(self.parents), dtype=np.int64)
        for node, parent in enumerate(self.parents.tolist()):
            levels[node] = levels[parent] + 1 if parent >= 0 else 0
        return levels

    def paths(self) -> npt.NDArray[np.bool_]:
        """bool [N, N]: row i marks the nodes on the path to node i, itself among them."""
        paths = np.eye(len(self.parents), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                paths[node] |= paths[parent]
        return paths


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Rows of different lengths in one forward, flat, without padding. T tokens in n rows.

    tokens int64 [T]; positions int64 [T], consecutive within a row; offsets int64 [n + 1]: row r owns
    tokens[offsets[r]:offsets[r + 1]], never empty; tables int32 [n, widest]: row r's block ids in order, padded
    with 0; wanted int64 [m]: flat indices of the tokens whose logits are wanted, ascending; owners int64 [n]: a
    number of the request that row r belongs to, needed only where a backend keeps state per row.

    Row r attends to everything at positions below its first token (already in its blocks) and causally to itself.
    trees by row, for backends that are `HoldsTrees`: of the positions from its root on, a node attends to those on its
    path only, and counts as standing where its path puts it (`standing`).
    seen int64 [k]: flat indices of the tokens whose hidden states somebody reads, ascending, for backends that are
    observed (`ShowsHidden`); None where that may be all of them.
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    wanted: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    trees: Mapping[int, TokenTree] = field(default_factory=dict)
    seen: npt.NDArray[np.int64] | None = None

    def tree_of(self, row: int) -> TokenTree:
        """The tree of a row that has one, without the nodes past the row's last position."""
        tree = self.trees[row]
        there = int(self.positions[self.offsets[row + 1] - 1]) + 1 - tree.root
        return TokenTree(tree.root, tree.parents[: max(0, there)])

    def standing(self) -> npt.NDArray[np.int64]:
        """int64 [T]: how many tokens come before each one, in its own continuation."""
        if not self.trees:
            return self.positions
        standing = self.positions.copy()
        for row, tree in self.trees.items():
            mine = standing[self.offsets[row] : self.offsets[row + 1]]
            nodes = mine >= tree.root
            mine[nodes] = tree.root + tree.levels()[mine[nodes] - tree.root]
        return standing


@dataclass(frozen=True, slots=True)
class Move:
    """What a row's pages hold at positions `sources`, ascending, is to stand at `first`, first + 1, …"""

    table: npt.NDArray[np.int32]
    first: int
    sources: Sequence[int]


class RowStates(Protocol):
    """What a backend keeps of each request besides its KV pages: the checkpointed kind of worker state."""

    def reserve(self, rows: int) -> None:
        """Make room for this many requests, once, before the first forward. Raises ConfigError when it is not there."""
        ...

    def covered(self, owner: int, start: int) -> int:
        """`start` where a row of this request may start there; else how many positions it can go on from, below it."""
        ...

    def forget(self, owner: int) -> None:
        """The request is gone, or begins anew. Unknown ones are ignored."""
        ...


class NoRowStates:
    """`RowStates` of a backend whose state is positional: what lies past a row's start is void, no undo needed."""

    def reserve(self, rows: int) -> None:
        """Nothing to make room for."""

    def covered(self, owner: int, start: int) -> int:
        """A row may start anywhere in its blocks."""
        del owner
        return start

    def forget(self, owner: int) -> None:
        """Nothing was kept."""


class Hardware(Protocol):
    """What a backend runs on, as far as a worker has to know when its results are there."""

    def arrived(self) -> None:
        """A batch of work came in."""
        ...

    def finish(self) -> None:
        """Wait until what forwards returned, and what was computed from it, may be told to others.

        Raises EmulationTooSlow where that may not be told, as it comes later than from the device that is emulated.
        """
        ...

    def counted(self) -> Steps:
        """What was waited for since the last call."""
        ...


Steps = tuple[int, int, int]
"""Results of an emulated device that were waited for: those that came in time, were late, and were refused."""


class AtOnce:
    """`Hardware` whose results are there when they can be read."""

    def arrived(self) -> None:
        """Nothing to note."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def counted(self) -> Steps:
        """Nothing is emulated."""
        return 0, 0, 0


class Backend(Protocol):
    """A loaded model with its own KV pages."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def context_length(self) -> int:
        """Positions that the model can address (config cap applied)."""
        ...

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        ...

    @property
    def place(self) -> str:
        """The hardware that its steps keep busy: two models of one place take turns."""
        ...

    @property
    def hardware(self) -> Hardware:
        """When results are there."""
        ...

    @property
    def states(self) -> RowStates:
        """What it keeps per request; `NoRowStates` where pages are all."""
        ...

    def bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of KV that one block of `block_tokens` positions takes, all layers together."""
        ...

    def allocate(self, blocks: int, block_tokens: int) -> None:
        """Make the KV pages, once, before the first forward."""
        ...

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """Make the pages `copies` hold what the pages `sources` hold; no page is in both."""
        ...

    def make_batch_invariant(self) -> None:
        """From now on a row's logits are the same bits in any company and cut in any way, at whatever cost.

        Raises ConfigError where that cannot be had.
        """
        ...

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's KV and return float32 logits [m, vocab_size] of the wanted tokens."""
        ...


@runtime_checkable
class HoldsTrees(Protocol):
    """A backend whose batches may have trees."""

    def move(self, moves: Sequence[Move]) -> None:
        """Put the kept paths of trees in order. No position is moved upwards; rows share none of these positions."""
        ...


@runtime_checkable
class RecordsSteps(Protocol):
    """A backend that can record its usual steps once and replay them; see `_step_shapes` for which."""

    def plan_steps(self, shapes: Sequence[StepShape]) -> None:
        """Before `allocate`: these steps are to be recorded."""
        ...

    @property
    def planned_steps(self) -> int:
        """How many there are to record."""
        ...

    def step_bytes(self, block_tokens: int) -> int:
        """What the planned steps will take on the device, about; 0 where none are planned."""
        ...

    def record_steps(self) -> Iterator[StepShape]:
        """Behind `allocate`: record what is planned, and yield each step done; once all are, `forward` replays them.

        Raises RuntimeError where one cannot be recorded.
        """
        ...


@runtime_checkable
class ShowsHidden(Protocol):
    """A backend whose hidden states others may read."""

    def observe(self, layers: Sequence[int]) -> None:
        """From now on every forward keeps the states that enter these layers, or the last ones where none is named.

        Raises ConfigError for a layer that there is not.
        """
        ...

    def observed(self) -> torch.Tensor:
        """[T, width] of the last forward's tokens in the model's own dtype, layers side by side.

        Of tokens that the batch said nobody reads (`RaggedBatch.seen`) it may be anything.
        """
        ...


@runtime_checkable
class DraftHead(Protocol):
    """A draft that goes on from hidden states of its target, which come with the tokens. It is loaded as a backend.

    Position p of its pages stands for token p together with the target's state at p − 1, so that pages hold what
    depends on tokens up to their own only, as every model's do; there is nothing at position 0.
    """

    @property
    def width(self) -> int:
        """Of its own states."""
        ...

    @property
    def read_width(self) -> int:
        """Of what it reads of the target's."""
        ...

    def fuse(self, read: torch.Tensor) -> torch.Tensor:
        """From what was observed of the target, [T, read_width], to states [T, width] that a forward goes on from."""
        ...

    def forward_from(
        self, batch: RaggedBatch, hidden: torch.Tensor, origins: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the batch's KV and return float32 logits [m, vocab_size] and states [m, width] of the wanted tokens.

        hidden [T, width] are the states at the positions before the batch's; origins int64 [n] the first position of
        each row that may be read, at least 1.
        """
        ...

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """See `Backend`."""
        ...
