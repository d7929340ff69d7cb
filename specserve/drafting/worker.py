"""The draft worker: plans in, drafted nodes out. It knows rows and slots; how tokens are drafted is the speculator's.

A `Plan` is answered by one message: the `Push` of all its rows, or a `Failed` that names the rows at fault, or none
when the plan as a whole could not be computed. A row whose dists are not finite is no fault: its chain ends there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from specserve import folders
from specserve.config import Config
from specserve.drafting import Job, Speculator
from specserve.drafting.workspace import DenseDists, DistStore, SparseDists, Workspace
from specserve.errors import ProtocolError
from specserve.models._stretches import one_length, split, tokens_in_range
from specserve.models._worker import load_backend
from specserve.models.loading import prepare
from specserve.sampling.grammar import Grammars
from specserve.sampling.profiles import Profile, Profiles
from specserve.text import Tokenizer
from specserve.transport.messages import Array, Close, Dists, Failed, Message, Open, Plan, Push
from specserve.types import DraftPicks, RuleName, WorkerInfo

log = logging.getLogger(__name__)


class DraftWorker:
    """A `transport.Worker` that holds a speculator and its slots. Never raises from `handle`.

    vocab_size bounds the tokens that may be fed. picks says for each rule how its drafted tokens are picked; those
    that are not in it are sampled. Only sampled tokens need their dists shipped, and only where the temperature is not
    0; a plan ships those of all its nodes or of none.
    grammars are needed for structured requests only.
    """

    def __init__(
        self,
        speculator: Speculator,
        workspace: Workspace,
        *,
        vocab_size: int,
        picks: Mapping[RuleName, DraftPicks] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._speculator = speculator
        self._workspace = workspace
        self._vocab_size = vocab_size
        self._picks = draft_picks() if picks is None else picks
        self._profiles = Profiles(grammars)

    def handle(self, message: Message) -> list[Message]:
        """Answer `Open` and `Close` with nothing, `Plan` as the module says, anything else with `Failed`."""
        match message:
            case Open():
                self._profiles.open(message)
                return []
            case Close():
                self._profiles.close(message)
                return []
            case Plan():
                return [self._plan(message)]
        return [_failed(-1, f"a draft worker does not understand {type(message).__name__}")]

    def _plan(self, message: Plan) -> Message:
        began = perf_counter()
        try:
            with torch.inference_mode():
                jobs, faults = self._read(message)
                if faults:
                    return Failed(message.plan, np.array(list(faults), dtype=np.int64), "; ".join(faults.values()))
                chains = self._speculator.propose(jobs, self._workspace)
                for job, chain in zip(jobs, chains, strict=True):
                    job.profile.wrote(job.first, chain)
                _write_chains(jobs, chains)
                return self._push(message, jobs, chains, began)
        except Exception as error:  # whatever one plan provokes must not end the worker
            log.exception("plan %d failed", message.plan)
            return _failed(message.plan, f"{type(error).__name__}: {error}")

    def _read(self, message: Plan) -> tuple[list[Job], dict[int, str]]:
        """The jobs of a plan, and for each row that cannot be served why.

        Raises ProtocolError when the plan's columns contradict each other.
        """
        one_length(
            rows=message.rows,
            epochs=message.epochs,
            starts=message.starts,
            feed_lengths=message.feed_lengths,
            depths=message.depths,
            table_lengths=message.table_lengths,
        )
        feeds = split("feeds", message.feeds, message.feed_lengths)
        slots = split("slots", message.slots, message.depths)
        tables = split("tables", message.tables, message.table_lengths)
        jobs, faults = [], {}
        for i, row in enumerate(message.rows.tolist()):
            try:
                profile = self._profiles.find(row, int(message.epochs[i]))
                jobs.append(self._job(int(message.starts[i]), feeds[i], slots[i], tables[i], profile))
                self._check(jobs[-1])
            except ProtocolError as error:
                faults[row] = f"row {row}: {error.message}"
        return jobs, faults

    def _job(self, start: int, feed: Array, slots: Array, table: Array, profile: Profile) -> Job:
        picks = self._picks.get(profile.rule, "sampling")
        if picks == "argmax":
            profile = replace(profile, temperature=0.0)
        return Job(start, feed, slots, table, profile, shared_noise=picks == "shared_noise" and profile.temperature > 0)

    def _check(self, job: Job) -> None:
        if not len(job.feed):
            raise ProtocolError("an empty feed; a draft continues from a fed token")
        if job.start < 0:
            raise ProtocolError(f"a feed that starts at position {job.start}")
        tokens_in_range(job.feed, self._vocab_size)
        job.profile.wrote(job.start, job.feed.tolist())
        if job.profile.constraint is not None:
            job.profile.constraint.write(job.start, job.feed.tolist())

    def _push(self, message: Plan, jobs: Sequence[Job], chains: Sequence[Sequence[int]], began: float) -> Push:
        lengths = [len(chain) for chain in chains]
        slots = _flat([job.slots[:length].tolist() for job, length in zip(jobs, lengths, strict=True)])
        firsts = np.array([job.first for job in jobs], dtype=np.int32)
        return Push(
            plan=message.plan,
            rows=message.rows.astype(np.int64),
            epochs=message.epochs,
            bases=firsts,
            covered=firsts,
            chain_lengths=np.array(lengths, dtype=np.int32),
            tokens=_flat(chains),
            parents=_flat([range(-1, length - 1) for length in lengths]),
            slots=slots,
            fed=_flat([[i < job.depth - 1 for i in range(n)] for job, n in zip(jobs, lengths, strict=True)]).astype(
                bool
            ),
            sampled=np.ones(len(slots), dtype=bool),
            dists=self._dists(jobs, slots),
            busy_s=perf_counter() - began,
        )

    def _dists(self, jobs: Sequence[Job], slots: Array) -> Dists:
        """Every node's dist, or none at all when no node was drawn."""
        drawn = any(job.profile.temperature > 0 and not job.shared_noise for job in jobs)
        return self._workspace.ship(slots) if drawn and len(slots) else Dists.none()


def _write_chains(jobs: Sequence[Job], chains: Sequence[Sequence[int]]) -> None:
    """Grammars follow the drafts as the KV does, whether or not the speculator looked at them."""
    for job, chain in zip(jobs, chains, strict=True):
        if job.profile.constraint is not None:
            job.profile.constraint.write(job.first, chain)


def _flat(rows: Sequence[Sequence[int]]) -> Array:
    return np.array([value for row in rows for value in row], dtype=np.int32)


def _failed(batch: int, reason: str) -> Failed:
    return Failed(batch, np.empty(0, dtype=np.int64), reason)


def build(config: Config) -> tuple[DraftWorker, WorkerInfo]:
    """Load the draft that the configuration names. Raises ConfigError for what cannot be loaded or does not fit."""
    backend, info = load_backend(config.draft.model, "draft", config.engine)
    speculator = folders.load("drafting", config.draft.speculator).build(config.draft, backend, info.vocab_size)
    workspace = Workspace(
        config.engine.slot_count, _dist_store(config, info.vocab_size, backend.device), backend.device
    )
    grammars = Grammars(Tokenizer.load(prepare(config.draft.model, log.info, role="draft")))
    worker = DraftWorker(speculator, workspace, vocab_size=backend.vocab_size, grammars=grammars)
    return worker, info


def _dist_store(config: Config, vocab_size: int, device: torch.device) -> DistStore:
    slots = config.engine.slot_count
    if config.draft.dist == "dense":
        return DenseDists(slots, vocab_size, device)
    return SparseDists(slots, min(config.draft.top_k, vocab_size), device)


def draft_picks() -> dict[RuleName, DraftPicks]:
    """How drafted tokens are picked under each rule."""
    rules = {name: folders.load("verification", name) for name in folders.names_in("verification")}
    return {name: rule.DRAFT_PICKS for name, rule in rules.items()}
