"""Draft heads that go on from the target's hidden states (EAGLE, EAGLE-3; Li et al. 2024 and 2025).

What is fed comes with the target's states. Each drafted token is kept with the head's own state, in its slot, and is
read together with it in the next step. Behind a verdict (R = 0) what the target kept of a chain is fed again with the
target's own states. Ahead of one, the head goes on from its own: a guess is read with the state that the token in whose
place it stands was picked from, the first one behind a whole chain with the state at the chain's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast

import numpy as np
import torch

from specserve.config import Config, DraftConfig
from specserve.drafting import Branch, DraftedTree, Grown, Job, Kind, Trunk
from specserve.drafting._ahead import AheadGrowth
from specserve.drafting._chains import Chain, Picker, feed_of, next_of
from specserve.drafting._trees import Growth
from specserve.drafting.workspace import Workspace
from specserve.errors import ConfigError, ProtocolError
from specserve.models import Backend, DraftHead, _head_folder
from specserve.models._stretches import ragged
from specserve.tree_shape import TreeShape

KIND: Final[Kind] = "model"


def build(config: DraftConfig, backend: Backend, vocab_size: int) -> Eagle:
    """A speculator on a loaded head. Raises ConfigError for a model of another kind."""
    check_model(config, is_head=isinstance(backend, DraftHead))
    return Eagle(cast(DraftHead, backend), vocab_size)


def check_model(config: DraftConfig, *, is_head: bool) -> None:
    """Raise ConfigError unless the draft model is a head."""
    if not is_head:
        raise ConfigError(
            f"draft.speculator is eagle, but {config.model.source!r} holds no draft head; use small_model for it"
        )


def layers_read(config: Config) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads; none for the target's last states. Raises ConfigError."""
    return _head_folder.layers_read(config.draft_model)


class Eagle:
    """A `Speculator`. Ids at or above vocab_size, the shared vocabulary's end, are never drafted."""

    def __init__(self, head: DraftHead, vocab_size: int) -> None:
        self._head = head
        self._vocab_size = vocab_size

    def propose(self, jobs: Sequence[Job], workspace: Workspace) -> list[list[int]]:
        """See `drafting.Speculator`. Raises ProtocolError for a feed without hidden states."""
        if not jobs:
            return []
        origins = np.array([job.origin for job in jobs], dtype=np.int64)
        logits, states = self._feed(jobs)
        chains = [Chain(job.profile, job.first, job.slots, job.shared_noise) for job in jobs]
        picker = Picker(chains, self._vocab_size, workspace)
        for step in range(max(job.depth for job in jobs)):
            rows = [row for row, job in enumerate(jobs) if job.depth > step]
            if step:
                batch = ragged([next_of(chains[row], jobs[row].table) for row in rows])
                before = np.array([jobs[row].slots[step - 1] for row in rows])
                logits, states = self._head.forward_from(batch, workspace.hidden(before), origins[rows])
            picker.pick(rows, logits)
            workspace.put_hidden(np.array([jobs[row].slots[step] for row in rows]), states)
        return [chain.tokens[: chain.healthy] for chain in chains]

    def grow(self, jobs: Sequence[Job], shape: TreeShape, workspace: Workspace) -> list[DraftedTree]:
        """See `drafting.GrowsTrees`. A family's slot keeps the state that its nodes are read with."""
        if not jobs:
            return []
        growth = Growth(jobs, shape, self._vocab_size, workspace)
        logits, states = self._feed(jobs)
        while True:
            workspace.put_hidden(growth.slots, states)
            growth.take(logits)
            stretches = growth.stretches()
            if not stretches:
                return growth.trees
            before = workspace.hidden(growth.slots_before)
            logits, states = self._head.forward_from(ragged(stretches), before, growth.origins)

    def _feed(self, jobs: Sequence[Job]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and states behind what is fed, of each job that drafts. Raises ProtocolError as `propose`."""
        origins = np.array([job.origin for job in jobs], dtype=np.int64)
        read = self._head.fuse(_states_before(jobs))
        return self._head.forward_from(ragged([feed_of(job) for job in jobs]), read, origins)

    def explore(self, trunks: Sequence[Trunk], branches: Sequence[Branch], workspace: Workspace) -> Iterator[Grown]:
        """See `drafting.Speculator`. Raises ProtocolError for committed tokens that come without hidden states."""
        growth = AheadGrowth(trunks, branches, workspace, self._vocab_size)
        read = self._states_before_trunks([trunks[index] for index in growth.fed], workspace)
        ends: dict[int, torch.Tensor] = {}  # by trunk, the state behind what is fed of it
        for step in range(growth.steps):
            sources, copies = growth.copies(step)
            if len(sources):
                self._head.copy_blocks(sources, copies)
            stretches = growth.stretches(step)
            if not stretches:
                yield growth.take(step, torch.empty(0, self._vocab_size))
                continue
            growing = growth.growing(step)
            owners = [branches[index].trunk for index in growing]
            before = _states_before_branches([growth.slot_before(index) for index in growing], owners, ends, workspace)
            feeding = [] if step else growth.fed
            origins = np.array([trunks[index].origin for index in [*feeding, *owners]], dtype=np.int64)
            hidden = before if step else torch.cat([*read, before])
            logits, states = self._head.forward_from(ragged(stretches), hidden, origins)
            ends |= dict(zip(feeding, states[: len(feeding)], strict=True))
            workspace.put_hidden(growth.slots(growing), states[len(feeding) :])
            yield growth.take(step, logits)

    def _states_before_trunks(self, trunks: Sequence[Trunk], workspace: Workspace) -> list[torch.Tensor]:
        """The states before what is fed of each: the target's, and in chains the head's own. Raises ProtocolError."""
        if not trunks:
            return []
        shown = [trunk.hidden for trunk in trunks if trunk.hidden is not None and 1 <= trunk.origin <= trunk.start]
        if len(shown) < len(trunks):
            raise ProtocolError("a draft head was told to begin before the target's states do")
        fused = torch.split(self._head.fuse(torch.cat(shown)), [len(states) for states in shown])
        return [
            states
            for trunk, committed in zip(trunks, fused, strict=True)
            for states in (committed, workspace.hidden(trunk.chain_slots[trunk.start + len(committed) - trunk.base :]))
        ]


def _states_before(jobs: Sequence[Job]) -> torch.Tensor:
    states = [job.hidden for job in jobs if job.hidden is not None and len(job.hidden) == len(job.feed)]
    if len(states) < len(jobs) or min(job.origin for job in jobs) < 1:
        raise ProtocolError("a draft head was fed tokens without the target's states before them")
    return torch.cat(states)


def _states_before_branches(
    slots: Sequence[int | None], trunks: Sequence[int], ends: dict[int, torch.Tensor], workspace: Workspace
) -> torch.Tensor:
    """The states [n, width] that branches' last tokens are read with: of their slots, or of their trunks' ends."""
    states = workspace.hidden(np.array([slot or 0 for slot in slots], dtype=np.int64))
    for row, (slot, trunk) in enumerate(zip(slots, trunks, strict=True)):
        if slot is None:
            states[row] = ends[trunk]
    return states
