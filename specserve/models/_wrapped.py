"""A backend around another one, which it leaves as it is but for what its own class says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from specserve.models import Backend, Hardware, RaggedBatch, RowStates

Inner = TypeVar("Inner", bound=Backend)


class Wrapped(Generic[Inner]):
    """A `Backend` that is another one in every respect."""

    def __init__(self, backend: Inner) -> None:
        self._backend = backend

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._backend.vocab_size

    @property
    def context_length(self) -> int:
        """Positions that the model can address."""
        return self._backend.context_length

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        return self._backend.device

    @property
    def place(self) -> str:
        """The hardware."""
        return self._backend.place

    @property
    def hardware(self) -> Hardware:
        """What results are waited for on."""
        return self._backend.hardware

    @property
    def states(self) -> RowStates:
        """What it keeps besides pages."""
        return self._backend.states

    def bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of one block."""
        return self._backend.bytes_per_block(block_tokens)

    def allocate(self, blocks: int, block_tokens: int) -> None:
        """Make the pages. Raises ConfigError when the device has no room for them."""
        self._backend.allocate(blocks, block_tokens)

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """Copy whole blocks."""
        self._backend.copy_blocks(sources, copies)

    def make_batch_invariant(self) -> None:
        """See `Backend`."""
        self._backend.make_batch_invariant()

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See `Backend`."""
        return self._backend.forward(batch)
