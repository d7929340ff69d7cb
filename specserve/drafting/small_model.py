"""A small model that drafts autoregressively: one ragged forward for the feeds, then one token per row and step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from specserve.config import DraftConfig
from specserve.drafting import Branch, DraftedTree, Grown, Job, Kind, Trunk
from specserve.drafting._ahead import AheadGrowth
from specserve.drafting._chains import Chain, Picker, feed_of, next_of
from specserve.drafting._trees import Growth
from specserve.drafting.workspace import Workspace
from specserve.errors import ConfigError
from specserve.models import Backend, DraftHead, _memory
from specserve.tree_shape import TreeShape

KIND: Final[Kind] = "model"


def build(config: DraftConfig, backend: Backend, vocab_size: int) -> SmallModel:
    """A speculator on a loaded model; what it ships is configured at the workspace. Raises ConfigError for a head."""
    check_model(config, is_head=isinstance(backend, DraftHead))
    return SmallModel(backend, vocab_size)


def check_model(config: DraftConfig, *, is_head: bool) -> None:
    """Raise ConfigError where the draft model is a head."""
    if is_head:
        raise ConfigError(f"{config.model.source!r} holds a draft head; set draft.speculator to eagle")


class SmallModel:
    """A `Speculator`. Ids at or above vocab_size, the shared vocabulary's end, are never drafted."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = min(vocab_size, backend.vocab_size)

    def propose(self, jobs: Sequence[Job], workspace: Workspace) -> list[list[int]]:
        """See `drafting.Speculator`."""
        if not jobs:
            return []
        logits = _memory.forward(self._backend, [feed_of(job) for job in jobs])
        chains = [Chain(job.profile, job.first, job.slots, job.shared_noise) for job in jobs]
        picker = Picker(chains, self._vocab_size, workspace)
        for step in range(max(job.depth for job in jobs)):
            rows = [row for row, job in enumerate(jobs) if job.depth > step]
            if step:
                logits = _memory.forward(self._backend, [next_of(chains[row], jobs[row].table) for row in rows])
            picker.pick(rows, logits)
        return [chain.tokens[: chain.healthy] for chain in chains]

    def grow(self, jobs: Sequence[Job], shape: TreeShape, workspace: Workspace) -> list[DraftedTree]:
        """See `drafting.GrowsTrees`. One forward per level, the nodes of a tree in one row."""
        if not jobs:
            return []
        growth = Growth(jobs, shape, self._vocab_size, workspace)
        stretches = [feed_of(job) for job in jobs]
        while stretches:
            growth.take(_memory.forward(self._backend, stretches))
            stretches = growth.stretches()
        return growth.trees

    def explore(self, trunks: Sequence[Trunk], branches: Sequence[Branch], workspace: Workspace) -> Iterator[Grown]:
        """See `drafting.Speculator`."""
        growth = AheadGrowth(trunks, branches, workspace, self._vocab_size)
        for step in range(growth.steps):
            sources, copies = growth.copies(step)
            if len(sources):
                self._backend.copy_blocks(sources, copies)
            stretches = growth.stretches(step)
            # Where no branch has a guess, nothing is left to compute behind the feeds.
            logits = _memory.forward(self._backend, stretches) if stretches else torch.empty(0, self._vocab_size)
            yield growth.take(step, logits)
