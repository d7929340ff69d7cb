"""A target together with heads that draft behind it: one backend, whose blocks hold what both keep per position.

The target's last state at each position lies in the same blocks as its keys and values. So a head finds the state
before any token that it is fed, whoever computed it: an earlier chunk, a sibling, a request whose prefix is cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from specserve.models import RaggedBatch
from specserve.models._row_groups import RaggedPlan
from specserve.models._step_graphs import StepGraphs
from specserve.models._step_shapes import StepShape
from specserve.models._stretches import Array
from specserve.models._wrapped import Wrapped
from specserve.models.paged_transformers import PagedTransformers


@dataclass(frozen=True, slots=True)
class Tail:
    """One row of a step: committed tokens from position `start` on, and what was drafted behind them in this round.

    table holds the blocks that cover them. wanted: the next token is drafted in this step.
    """

    start: int
    feed: Array
    drafted: Sequence[int]
    table: Array
    wanted: bool


class SerialHeads(Protocol):
    """Heads that draft one token a step, each from a token and a state: the target's, or the one of the step before."""

    @property
    def fed(self) -> int:
        """Steps that take place whatever is drafted, since their heads keep something of every token."""
        ...

    def bytes_per_position(self) -> int:
        """What they keep in the target's blocks."""
        ...

    def allocate(self, target: PagedTransformers, blocks: int, block_tokens: int) -> None:
        """Make their pages, once those of the target are there."""
        ...

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """See `Backend`."""
        ...

    def keep(self, plan: RaggedPlan, states: torch.Tensor) -> None:
        """Keep the target's last states [T, width] of a forward."""
        ...

    def read(self, step: int, tails: Sequence[Tail], before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Step `step`, from 0, of all tails: logits float32 [m, V] and states [m, width] of the wanted ones, in order.

        before [m, width] are the states that the step before handed on for them; None in step 0.
        """
        ...


class StatePages:
    """States [blocks · block_tokens, width] by position, in the blocks of the target. Allocated once, zeroed."""

    def __init__(self, blocks: int, block_tokens: int, width: int, like: torch.Tensor) -> None:
        self._block_tokens = block_tokens
        self._rows = like.new_zeros(blocks * block_tokens, width)

    def put(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Keep states [n, width] at slots int64 [n]."""
        self._rows.index_copy_(0, slots, states)

    def get(self, slots: torch.Tensor) -> torch.Tensor:
        """States [n, width] of slots int64 [n]."""
        return self._rows[slots]

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """See `Backend`."""
        blocks = self._rows.view(-1, self._block_tokens, self._rows.shape[1])
        blocks[list(copies)] = blocks[list(sources)]


class TargetWithHeads(Wrapped[PagedTransformers]):
    """A `Backend`: the target, whose every forward leaves its last states where the heads find them.

    It records the target's steps; its heads' own are launched one by one.
    """

    def __init__(self, target: PagedTransformers, heads: SerialHeads) -> None:
        target.observe(())
        super().__init__(target)
        self.heads = heads
        self._block_tokens = 0

    @property
    def width(self) -> int:
        """Of the states."""
        return width_of(self._backend)

    def bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of one block: the target's keys and values, and what the heads keep."""
        return self._backend.bytes_per_block(block_tokens) + block_tokens * self.heads.bytes_per_position()

    def allocate(self, blocks: int, block_tokens: int) -> None:
        """Make all pages. Raises ConfigError when the device has no room for them."""
        self._block_tokens = block_tokens
        self._backend.allocate(blocks, block_tokens)
        self.heads.allocate(self._backend, blocks, block_tokens)

    def plan_steps(self, shapes: Sequence[StepShape]) -> None:
        """See `RecordsSteps`."""
        self._backend.plan_steps(shapes)

    @property
    def planned_steps(self) -> int:
        """See `RecordsSteps`."""
        return self._backend.planned_steps

    def step_bytes(self, block_tokens: int) -> int:
        """See `RecordsSteps`."""
        return self._backend.step_bytes(block_tokens)

    def record_steps(self) -> Iterator[StepShape]:
        """See `RecordsSteps`."""
        yield from self._backend.record_steps()

    @property
    def graphs(self) -> StepGraphs | None:
        """The target's recorded steps, once there are any."""
        return self._backend.graphs

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """Copy whole blocks, the heads' part too."""
        self._backend.copy_blocks(sources, copies)
        self.heads.copy_blocks(sources, copies)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """The target's forward."""
        logits = self._backend.forward(replace(batch, seen=None))  # they keep the states of all tokens
        states = self._backend.observed()
        self.heads.keep(RaggedPlan(batch, self._block_tokens, states.dtype, states.device), states)
        return logits


def width_of(target: PagedTransformers) -> int:
    """Of a target's last states."""
    return int(target.model.config.get_text_config().hidden_size)
