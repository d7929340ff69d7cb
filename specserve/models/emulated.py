"""A model without weights that takes the time of a device that is not there.

It computes exactly, in next to no time (`_hash_language`), and holds each step back until the device of the
configured profile would have finished it (`_device_profile`, `_pace`). So the whole system runs as if on its GPUs, and
what is measured is everything but the models. Target and draft are this one class; the draft is as good as configured.
Its pages hold digests of histories and refuse what was never written (`_digest_pages`), so it also checks every
position, table and feed that it is given.

Logits are dense, over a vocabulary of 458 ids: 64 rows of 6 positions are 0.7 MB, and nobody needs a sparse way around
them. Answers end at their token limit only: the language never says its end token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from specserve import cache
from specserve.config import ModelConfig
from specserve.errors import ProtocolError
from specserve.models import Move, RaggedBatch, _device_profile, _syllables
from specserve.models._device_profile import Device, Role
from specserve.models._digest_pages import DigestPages
from specserve.models._hash_language import HashLanguage, Quality
from specserve.models._pace import Pace
from specserve.models._paged_model import PagedModel

_RECIPE = 2  # part of the cache key: raise it when the folder's contents change


def folder(role: Role) -> Path:
    """The model folder of a role: a tokenizer, and which role it is."""
    return cache.built_once(f"emulated-{role}-{_RECIPE}", lambda new: _write(new, role))


def _write(new: Path, role: Role) -> None:
    size = _syllables.write(new)
    described = {"model_type": "specserve_emulated", "role": role, "vocab_size": size, "eos_token_id": _syllables.END}
    (new / "config.json").write_text(json.dumps(described), encoding="utf-8")


def build(config: ModelConfig, folder: Path) -> EmulatedModel:
    """The emulated model of a folder that `loading.prepare` returned. Raises ConfigError for a bad profile."""
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    role: Role = described["role"]
    chosen = config.emulated
    quality = Quality(chosen.acceptance, chosen.runner_up_hit, chosen.runners_up)
    language = HashLanguage(
        chosen.seed,
        quality,
        first=_syllables.FIRST_SYLLABLE,
        count=_syllables.SYLLABLES,
        vocab_size=described["vocab_size"],
    )
    device = _device_profile.load(chosen.profile).device(role)
    context = device.context_length if config.context_length is None else config.context_length
    return EmulatedModel(
        language, role, device, vocab_size=described["vocab_size"], context_length=context, strict=chosen.strict
    )


class EmulatedModel(PagedModel[DigestPages]):
    """A `Backend` on the CPU, whatever is emulated. See the module."""

    def __init__(
        self,
        language: HashLanguage,
        role: Role,
        device: Device,
        *,
        vocab_size: int,
        context_length: int,
        strict: bool = False,
    ) -> None:
        super().__init__(torch.device("cpu"), context_length)
        self._role = role
        self._logits = language.target if role == "target" else language.draft
        self._emulated = device
        self._vocab_size = vocab_size
        self._pace = Pace(device, strict=strict)

    @property
    def place(self) -> str:
        """A device of its own for each role."""
        return f"emulated {self._role}"

    @property
    def hardware(self) -> Pace:
        """What takes the time of each step."""
        return self._pace

    def bytes_per_block(self, block_tokens: int) -> int:
        """What the emulated model would need, so that as many requests fit as on its device."""
        return block_tokens * self._emulated.kv_bytes_per_position

    def allocate(self, blocks: int, block_tokens: int) -> None:
        """Make the pages of digests: 8 bytes per position."""
        self._pages = DigestPages(blocks, block_tokens)

    def make_batch_invariant(self) -> None:
        """Nothing to do: logits are a function of a row's own history."""

    def move(self, moves: Sequence[Move]) -> None:
        """See `HoldsTrees`; a device does so in no time."""
        self.pages.move(moves)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's digests and return float32 logits [m, vocab_size], which `hardware` is to be waited for.

        Raises ProtocolError for a batch that reads what was never written, or goes beyond the context.
        """
        pages = self.pages
        if batch.standing().max(initial=0) >= self._context_length:
            raise ProtocolError(f"position {batch.standing().max()} in a context of {self._context_length}")
        digests = pages.write(batch)
        self._pace.step(len(batch.offsets) - 1, len(batch.tokens))
        return torch.from_numpy(self._logits(digests[batch.wanted]))
