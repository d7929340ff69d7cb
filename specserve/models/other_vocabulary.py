"""A model that is spoken to in another model's tokens; see `_other_vocabulary` for which are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import Backend, RaggedBatch, _other_vocabulary, paged_transformers
from specserve.models._wrapped import Wrapped


def build(config: ModelConfig, folder: Path) -> OtherVocabulary:
    """Load the folder that `loading.prepare` returned. Raises ConfigError for what cannot be served."""
    return OtherVocabulary(paged_transformers.build(config, folder), *_other_vocabulary.read(folder))


class OtherVocabulary(Wrapped[Backend]):
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
        super().__init__(backend)
        self._read_as = read_as.numpy()
        self._target_ids, self._draft_ids = target_ids.to(backend.device), draft_ids.to(backend.device)

    @property
    def vocab_size(self) -> int:
        """The other vocabulary's size."""
        return len(self._read_as)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See `Backend`."""
        found = self._backend.forward(replace(batch, tokens=self._read_as[batch.tokens]))
        logits = found.new_full((len(found), self.vocab_size), float("-inf"))
        return logits.index_copy_(-1, self._target_ids, found[:, self._draft_ids])
