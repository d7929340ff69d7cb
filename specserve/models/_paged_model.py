"""What backends with pages have in common; each writes its own forward, and what it does otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from specserve.errors import ConfigError
from specserve.models import AtOnce, Hardware, NoRowStates, RowStates, loading
from specserve.models._pages import LayerLayout, Pages


class CopiesBlocks(Protocol):
    """Pages of any content."""

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """See `Backend`."""
        ...


PagesT = TypeVar("PagesT", bound=CopiesBlocks)


class PagedModel(Generic[PagesT]):
    """The facts of a `Backend` whose results are there at once and whose pages are all that it keeps."""

    _vocab_size: int
    _pages: PagesT | None = None

    def __init__(self, device: torch.device, context_length: int) -> None:
        self._device = device
        self._context_length = context_length

    @property
    def vocab_size(self) -> int:
        """Width of the logits: the head's own, padding included."""
        return self._vocab_size

    @property
    def context_length(self) -> int:
        """Positions that are served."""
        return self._context_length

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        return self._device

    @property
    def place(self) -> str:
        """The GPU, or this machine's CPU."""
        return loading.place_of(self._device)

    @property
    def hardware(self) -> Hardware:
        """Reading a result waits for it."""
        return AtOnce()

    @property
    def states(self) -> RowStates:
        """Pages are all that it keeps."""
        return NoRowStates()

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """Copy whole pages. Raises ConfigError before `allocate`."""
        self.pages.copy_blocks(sources, copies)

    @property
    def pages(self) -> PagesT:
        """What it keeps. Raises ConfigError before `allocate`."""
        if self._pages is None:
            raise ConfigError(f"{type(self).__name__} has no pages yet; call allocate first")
        return self._pages


class AttentionModel(PagedModel[Pages]):
    """A `PagedModel` whose layers keep keys and values. `_layouts`, by layer, is found out by who inherits."""

    _layouts: dict[int, LayerLayout]
    _spare_blocks = 0
    """Behind those that are given out, for what recorded steps write as padding."""

    def __init__(self, device: torch.device, dtype: torch.dtype, context_length: int) -> None:
        super().__init__(device, context_length)
        self._dtype = dtype

    def bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of KV of one block, all layers together; 0 for a model that attends nowhere."""
        return block_tokens * sum(layout.bytes_per_position for layout in self._layouts.values())

    def allocate(self, blocks: int, block_tokens: int) -> None:
        """Make the KV pages. Raises ConfigError when the device has no room for them."""
        try:
            self._pages = Pages(self._layouts, blocks + self._spare_blocks, block_tokens, self._device)
        except RuntimeError as error:
            size = blocks * self.bytes_per_block(block_tokens) / 2**30
            raise ConfigError(f"no room for {size:.2f} GiB of KV pages on {self._device}: {error}") from None
