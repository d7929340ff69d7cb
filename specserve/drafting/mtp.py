"""Multi-token-prediction heads made for the target (DeepSeek-V3, 2024; Gemma 4, 2026), which live beside the verifier.

The verifier runs them behind its verdict: no worker of their own, and no hidden states on the wire. A chain is drafted
token by token, each step one forward of a head, from the newest token and the target's last state before it (R = 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from specserve.config import DEMO, Config
from specserve.drafting import Branch, Grown, Job, Kind, Trunk
from specserve.drafting._chains import Chain, Picker
from specserve.drafting.worker import beside
from specserve.drafting.workspace import Workspace
from specserve.errors import ConfigError, ProtocolError
from specserve.models import Backend, _constant_heads, _mtp_heads, _mtp_layout, loading
from specserve.models._serial_heads import SerialHeads, Tail, TargetWithHeads
from specserve.models.paged_transformers import PagedTransformers
from specserve.sampling.grammar import Grammars
from specserve.transport import Worker

KIND: Final[Kind] = "beside"


def attach(config: Config, target: Backend, folder: Path) -> TargetWithHeads:
    """The loaded target together with the heads in its folder. Raises ConfigError where that cannot be."""
    check_source(config)
    if not isinstance(target, PagedTransformers):
        raise ConfigError(_without_states(config))
    own = heads_folder(config)
    if own is not None and _constant_heads.is_assistant(own):
        return TargetWithHeads(target, _constant_heads.load(target, config.target, own))
    return TargetWithHeads(target, _mtp_heads.load(target, folder if own is None else own))


def check_source(config: Config) -> None:
    """Raise ConfigError for a target whose heads are lost where it is converted, unless there are others beside it."""
    if heads_folder(config) is None and loading.is_converted(config.target):
        raise ConfigError(
            f"the target {config.target.source!r} holds no multi-token-prediction heads, which converted files never "
            f"do; use a folder with them, or another draft.speculator"
        )


def _without_states(config: Config) -> str:
    return (
        f"draft.speculator is mtp, whose heads read the target's hidden states, which {config.target.source!r} "
        f"does not show; use another draft.speculator"
    )


def heads_folder(config: Config) -> Path | None:
    """Where the heads are, if not in the target's own folder: what draft.model.source names, where it names anything.

    Raises ConfigError for what is no model folder.
    """
    source = config.draft.model.source
    if source in (DEMO, config.target.source):  # the default, which has no heads
        return None
    path = Path(source).expanduser()
    loading.read_model_config(path)
    return path


def describe(config: Config, folder: Path) -> str:
    """The heads of this target's folder in a line for people, by what the files say. Raises ConfigError as `attach`."""
    if config.engine.outcomes not in ("auto", 0):
        raise ConfigError(
            f"engine.outcomes is {config.engine.outcomes}, but multi-token-prediction heads only go on from a verdict; "
            f"set engine.outcomes to 0 or auto"
        )
    check_source(config)
    backend = loading.backend_of(folder, config.target)
    if backend != loading.PAGED:
        raise ConfigError(_without_states(config))
    told, own = loading.read_model_config(folder), heads_folder(config)
    if own is not None and _constant_heads.is_assistant(own):
        return f"{own}: a head at a constant position, on the target's keys and values"
    description, names = _mtp_layout.find(folder if own is None else own, int(told["num_hidden_layers"]))
    _mtp_layout.check_width(names, int(told["hidden_size"]))
    count = "1 head" if description.heads == 1 else f"{description.heads} heads"
    return f"{count} at advancing positions; chains may be longer, the last one goes on"


def worker(config: Config, backend: TargetWithHeads, vocab_size: int, grammars: Grammars) -> Worker:
    """What drafts behind the verdicts of a target that `attach` gave its heads."""
    speculator = build(backend.heads, vocab_size)
    return beside(config, speculator, backend.width, backend, vocab_size, grammars)


def build(heads: SerialHeads, vocab_size: int) -> Mtp:
    """A speculator on these heads."""
    return Mtp(heads, vocab_size)


class Mtp:
    """A `Speculator`. Ids at or above vocab_size, the shared vocabulary's end, are never drafted."""

    def __init__(self, heads: SerialHeads, vocab_size: int) -> None:
        self._heads = heads
        self._vocab_size = vocab_size

    def propose(self, jobs: Sequence[Job], workspace: Workspace) -> list[list[int]]:
        """See `drafting.Speculator`."""
        chains = [Chain(job.profile, job.first, job.slots, job.shared_noise) for job in jobs]
        picker = Picker(chains, self._vocab_size, workspace)
        for step in range(max([self._heads.fed, *(job.depth for job in jobs)])):
            rows = [row for row, job in enumerate(jobs) if job.depth > step]
            tails = [
                Tail(job.start, job.feed, chain.tokens, job.table, job.depth > step)
                for job, chain in zip(jobs, chains, strict=True)
            ]
            before = workspace.hidden(np.array([jobs[row].slots[step - 1] for row in rows])) if step and rows else None
            logits, states = self._heads.read(step, tails, before)
            if rows:
                picker.pick(rows, logits)
                workspace.put_hidden(np.array([jobs[row].slots[step] for row in rows]), states)
        return [chain.tokens[: chain.healthy] for chain in chains]

    def explore(self, trunks: Sequence[Trunk], branches: Sequence[Branch], workspace: Workspace) -> Iterator[Grown]:
        """Raises ProtocolError: heads go on from verdicts only, and nobody asks."""
        raise ProtocolError("multi-token-prediction heads cannot draft ahead of a verdict")
