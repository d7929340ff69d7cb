"""A small model that drafts autoregressively: one ragged forward for the feeds, then one token per row and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from specserve.config import DraftConfig
from specserve.drafting import Job, Kind
from specserve.drafting.workspace import Workspace
from specserve.errors import SpecserveError
from specserve.models import Backend
from specserve.models._stretches import Stretch, ragged
from specserve.sampling.constraint import Constraint, restrict
from specserve.sampling.dists import greedy_choice, process
from specserve.sampling.noise import Purpose, token_keys, uniform
from specserve.sampling.processors import Place, apply
from specserve.sampling.profiles import Settings
from specserve.transport.messages import Array

KIND: Final[Kind] = "model"


def build(config: DraftConfig, backend: Backend, vocab_size: int) -> SmallModel:
    """A speculator on a loaded model; what it ships is configured at the workspace."""
    return SmallModel(backend, vocab_size)


class SmallModel:
    """A `Speculator`. Ids at or above vocab_size, the shared vocabulary's end, are never drafted."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = min(vocab_size, backend.vocab_size)

    def propose(self, jobs: Sequence[Job], workspace: Workspace) -> list[list[int]]:
        """See `drafting.Speculator`."""
        if not jobs:
            return []
        logits = self._backend.forward(ragged([_feed(job) for job in jobs]))
        chains = _Chains(jobs, self._vocab_size, workspace)
        for step in range(max(job.depth for job in jobs)):
            if step:
                rows = chains.rows(step)
                logits = self._backend.forward(ragged([_last(jobs[r], chains.tokens[r]) for r in rows]))
            chains.choose(step, logits)
        return [tokens[:length] for tokens, length in zip(chains.tokens, chains.lengths, strict=True)]


class _Chains:
    """The chains of one plan as they grow. Noise and settings of all steps are made once.

    lengths[r] counts row r's tokens before the first one that came of logits which are not finite.
    """

    def __init__(self, jobs: Sequence[Job], vocab_size: int, workspace: Workspace) -> None:
        self.tokens: list[list[int]] = [[] for _ in jobs]
        self.lengths = [0] * len(jobs)
        self._jobs = jobs
        self._vocab_size = vocab_size
        self._workspace = workspace
        self._settings = Settings.of([job.profile for job in jobs])
        self._sampled = bool((self._settings.temperature > 0).any())
        if self._sampled:
            first = torch.tensor([job.first for job in jobs])
            places = torch.arange(max(job.depth for job in jobs))
            positions = first[:, None] + places
            seeds, branches = self._settings.seeds[:, None], self._settings.branches[:, None]
            self._noise = uniform(seeds, Purpose.PROPOSE, positions, branches, places)
            self._shared = torch.tensor([job.shared_noise for job in jobs])
            self._keys = token_keys(seeds, positions, branches)

    def rows(self, step: int) -> list[int]:
        """The jobs that draft a token in this step."""
        return [row for row, job in enumerate(self._jobs) if job.depth > step]

    def choose(self, step: int, logits: torch.Tensor) -> None:
        """Pick the step's tokens from logits [m, V] of `rows(step)`."""
        rows = self.rows(step)
        apply(logits, self._places(rows), self._vocab_size)
        logits = self._restricted(rows, step, logits)
        finite = logits[:, : self._vocab_size].amax(-1).isfinite()
        tokens = self._draw(rows, step, logits) if self._sampled else greedy_choice(logits, self._vocab_size)
        for row, token, healthy in zip(rows, *torch.stack([tokens, finite.long()]).tolist(), strict=True):
            self.lengths[row] += healthy if self.lengths[row] == step else 0
            self.tokens[row].append(token)

    def _places(self, rows: list[int]) -> list[Place]:
        chains = ((at, self._jobs[row].profile.processors, self.tokens[row]) for at, row in enumerate(rows))
        return [Place(at, processors, drafted) for at, processors, drafted in chains if processors is not None]

    def _restricted(self, rows: list[int], step: int, logits: torch.Tensor) -> torch.Tensor:
        """Logits under the rows' grammars. An ended or impossible answer allows nothing, which ends its chain."""
        held, bits = [], []
        for index, row in enumerate(rows):
            constraint = self._jobs[row].profile.constraint
            if constraint is not None:
                held.append(index)
                bits.append(_allowed(constraint, self._jobs[row], self.tokens[row], self.lengths[row]))
        return restrict(logits, held, bits)

    def _draw(self, rows: list[int], step: int, logits: torch.Tensor) -> torch.Tensor:
        index = torch.tensor(rows)
        settings = self._settings.take(index)
        dist = process(logits, settings.temperature, settings.top_p, settings.top_k, self._vocab_size, settings.min_p)
        slots = np.array([self._jobs[row].slots[step] for row in rows])
        self._workspace.put(slots, dist)
        tokens = self._workspace.draw(slots, self._noise[index, step])
        shared = self._shared[index].nonzero().squeeze(1)
        if len(shared):
            tokens[shared.to(tokens.device)] = self._workspace.race(
                slots[shared.numpy()], self._keys[index[shared], step]
            )
        return tokens


def _allowed(constraint: Constraint, job: Job, drafted: list[int], healthy: int) -> Array | None:
    """What may follow the drafted tokens; None past the chain's end."""
    if healthy < len(drafted):
        return None
    try:
        constraint.write(job.first + len(drafted[:-1]), drafted[-1:])
        return None if constraint.ended else constraint.allowed()
    except SpecserveError:  # the verifier tells the client; here there is just nothing to draft
        return None


def _feed(job: Job) -> Stretch:
    return Stretch(job.start, job.feed, job.table, 1 if job.depth else 0)


def _last(job: Job, tokens: list[int]) -> Stretch:
    return Stretch(job.first + len(tokens) - 1, tokens[-1:], job.table, 1)
