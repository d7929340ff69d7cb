"""ONE FILE PER BACKEND: a model on paged KV that writes tokens at given positions and shows logits where asked.

A backend knows nothing of requests, drafts or rules: rows, positions and block tables come with every batch, and
what lies past a row's last position in its blocks is void by definition. Files that begin with an underscore are
parts, not choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

NOT_CHOICES = frozenset({"cache", "loading", "threads", "vocabulary"})


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Rows of different lengths in one forward, flat, without padding. T tokens in n rows.

    tokens int64 [T]; positions int64 [T], consecutive within a row; offsets int64 [n + 1]: row r owns
    tokens[offsets[r]:offsets[r + 1]], never empty; tables int32 [n, widest]: row r's block ids in order, padded
    with 0; wanted int64 [m]: flat indices of the tokens whose logits are wanted, ascending.

    Row r attends to everything at positions below its first token (already in its blocks) and causally to itself.
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    wanted: npt.NDArray[np.int64]


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

    def bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of KV that one block of `block_tokens` positions takes, all layers together."""
        ...

    def allocate(self, blocks: int, block_tokens: int) -> None:
        """Make the KV pages, once, before the first forward."""
        ...

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's KV and return float32 logits [m, vocab_size] of the wanted tokens."""
        ...
