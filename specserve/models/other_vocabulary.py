"""A model that is spoken to in another model's tokens; see `_other_vocabulary` for which are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import Backend, Hardware, RaggedBatch, RowStates, _other_vocabulary, paged_transformers


def build(config: ModelConfig, folder: Path) -> OtherVocabulary:
    """Load the folder that `loading.prepare` returned. Raises ConfigError for what cannot be served."""
    return OtherVocabulary(paged_transformers.build(config, folder), *_other_vocabulary.read(folder))


class OtherVocabulary:
    """A `Backend` around another one, which reads id i as read_as[i] and says target_ids[k] by draft_ids[k].

    read_as int64 [V]; target_ids and draft_ids int64 [m]. Other ids have a logit of −∞.
    """

    def __init__(
        self, backend: Backend, read_as: torch.Tensor, target_ids: torch.Tensor, draft_ids: torch.Tensor
    ) -> None:
        if int(max(read_as.max(), draft_ids.max())) >= backend.vocab_size:
            raise ConfigError(
                f"the draft's tokenizer has more ids than its logits, which are {backend.vocab_size} wide"
            )
        self._backend = backend
        self._read_as = read_as.numpy()
        self._target_ids, self._draft_ids = target_ids.to(backend.device), draft_ids.to(backend.device)

    @property
    def vocab_size(self) -> int:
        """The other vocabulary's size."""
        return len(self._read_as)

    @property
    def context_length(self) -> int:
        """See `Backend`."""
        return self._backend.context_length

    @property
    def device(self) -> torch.device:
        """See `Backend`."""
        return self._backend.device

    @property
    def place(self) -> str:
        """See `Backend`."""
        return self._backend.place

    @property
    def hardware(self) -> Hardware:
        """The model's own."""
        return self._backend.hardware

    @property
    def states(self) -> RowStates:
        """See `Backend`."""
        return self._backend.states

    def bytes_per_block(self, block_tokens: int) -> int:
        """See `Backend`."""
        return self._backend.bytes_per_block(block_tokens)

    def allocate(self, blocks: int, block_tokens: int) -> None:
        """See `Backend`."""
        self._backend.allocate(blocks, block_tokens)

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """See `Backend`."""
        self._backend.copy_blocks(sources, copies)

    def make_batch_invariant(self) -> None:
        """See `Backend`."""
        self._backend.make_batch_invariant()

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See `Backend`."""
        found = self._backend.forward(replace(batch, tokens=self._read_as[batch.tokens]))
        logits = found.new_full((len(found), self.vocab_size), float("-inf"))
        return logits.index_copy_(-1, self._target_ids, found[:, self._draft_ids])
