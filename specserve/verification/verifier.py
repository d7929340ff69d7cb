"""The verifier: one ragged forward of the target per round, then each row's rule, then one copy to the host.

Rows of prefill and decode share the forward. A row whose feed ends at absolute position e has its target rows
j = 0 … K at e + 1 + j; noise is keyed by that position, here as in the draft worker.

A `Verify` is answered by one message: the `Verdict` of all its rows, or a `Failed` that names the rows at fault, or
none when the round as a whole could not be computed, or a `Cannot` that names the rows which must be fed again from
where they are still covered (with recurrent state only; nothing was computed then). Sending the other rows again
costs time only: noise is keyed by position, and histories are written by position, so they get the verdict that they
would have had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from specserve import folders, native
from specserve.config import NO_SPECULATOR, Config, EngineConfig
from specserve.errors import ConfigError, EmulationTooSlow, GroupLost, ProtocolError
from specserve.models import AtOnce, Backend, Hardware, HoldsTrees, Move, ShowsHidden, _memory, _memory_plan, _moments
from specserve.models._ranks import RankGroup
from specserve.models._worker import load_backend
from specserve.models.loading import prepare
from specserve.sampling import host
from specserve.sampling.blocks import peaks
from specserve.sampling.constraint import restrict
from specserve.sampling.dists import greedy_choice, process
from specserve.sampling.grammar import Grammars
from specserve.sampling.processors import apply
from specserve.sampling.profiles import Profiles
from specserve.sampling.wire import Support, decode
from specserve.text import Tokenizer
from specserve.transport.messages import (
    Array,
    Close,
    Dists,
    Drafted,
    Failed,
    Message,
    Open,
    Verdict,
    Verify,
    empty,
)
from specserve.types import RuleName, WorkerInfo
from specserve.verification import Judge, TreeJudge, _masks, all_rules, judges_of, tree_judges
from specserve.verification._beside import Beside
from specserve.verification._draft_rows import DraftRows
from specserve.verification._greedy import follow_choices
from specserve.verification._group import Group, grouped
from specserve.verification._masks import Masks
from specserve.verification._rows import Row, judged_places, processed_places, read, uncovered
from specserve.verification._scores import Scorer
from specserve.verification._shown import shown
from specserve.verification._tree import DraftTree

LayersRead = Callable[[Config], tuple[int, ...]]

_TRIES = 3
"""Of a round whose results are refused: its first step after a pause may be slow, and the next one is not."""

log = logging.getLogger(__name__)


class Verifier:
    """A `transport.Worker` that holds the target. `handle` raises GroupLost only.

    vocab_size is the size of the vocabulary that draft and target share; ids at or above it are never chosen. engine
    configures the rules and tells the size of the backend's pages; grammars are needed for structured requests only;
    hardware is what results are waited for on, where reading them does not do that. beside drafts in this process what
    verdicts bring along. Raises ConfigError when the configured rule is not one that can be built, or trees are
    configured for a rule or a target that cannot check them.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int,
        engine: EngineConfig | None = None,
        grammars: Grammars | None = None,
        hardware: Hardware | None = None,
        beside: Beside | None = None,
    ) -> None:
        self._backend = backend
        self._trees = backend if isinstance(backend, HoldsTrees) else None
        self._shows = backend if isinstance(backend, ShowsHidden) else None
        self._beside = beside
        self._hardware = AtOnce() if hardware is None else hardware
        self._vocab_size = min(vocab_size, backend.vocab_size)
        self._profiles = Profiles(grammars)
        native.library()  # where it must be compiled first, before the first round
        self._mask_thread = ThreadPoolExecutor(1, "specserve-masks")
        engine = EngineConfig() if engine is None else engine
        self._block_tokens = engine.block_tokens
        self._judges = judges_of(engine)
        if engine.tree_shape is not None and self._trees is None:
            raise ConfigError(
                "engine.tree needs a target whose attention is all on paged KV, which this one's is not; leave "
                "engine.tree out"
            )
        self._tree_judges = tree_judges()
        self._rules = {name: rule for name, rule in all_rules().items() if name in self._judges}
        self._greedy_walks = frozenset(name for name, rule in self._rules.items() if rule.GREEDY_WALK)

    @property
    def rules(self) -> dict[RuleName, bool]:
        """The rules that rows may be opened with, and whether each is lossless."""
        return {name: rule.LOSSLESS for name, rule in self._rules.items()}

    def handle(self, message: Message) -> list[Message]:
        """Answer `Open` and `Close` with nothing, `Verify` as the module says, anything else with `Failed`."""
        if self._beside is not None and isinstance(message, Open | Close):
            self._beside.hear(message)
        match message:
            case Open():
                self._profiles.open(message)
                self._backend.states.forget(message.row)
                return []
            case Close():
                self._profiles.close(message)
                self._backend.states.forget(message.row)
                return []
            case Verify():
                return [self._verify(message)]
        return [_failed(-1, {}, f"a verifier does not understand {type(message).__name__}")]

    def _verify(self, message: Verify) -> Message:
        try:
            with torch.inference_mode():
                return self._round(message, _TRIES)
        except GroupLost:
            raise  # not this batch's fault: the whole worker is of no use
        except Exception as error:  # whatever one batch provokes must not end the worker
            log.exception("round %d failed", message.round)
            return _failed(message.round, {}, f"{type(error).__name__}: {error}")

    def _round(self, message: Verify, tries: int) -> Message:
        """Compute a round; again, while there are tries, where the hardware refuses to tell the results."""
        began = perf_counter()
        self._hardware.arrived()
        rows, faults = read(message, self._profiles, self._backend.vocab_size, self._block_tokens)
        if faults:
            return _failed(message.round, faults)
        cannot = uncovered(message, rows, self._backend.states)
        if cannot is not None:
            return cannot
        building = self._build_masks(rows)
        logits = self._forward(rows)
        forwarded = _moments.now(self._backend.device)
        masks = building.result()
        if masks.faults:
            return _failed(message.round, {int(message.rows[i]): why for i, why in masks.faults.items()})
        scorer = Scorer(rows, logits, self._vocab_size)
        judged_at = judged_places(rows)
        logits = logits if judged_at is None else logits[judged_at]
        choices, highest = peaks(logits[:, : self._vocab_size])
        processed = processed_places(rows)
        if masks.rows or processed:
            logits = restrict(logits, masks.rows, masks.bits)
            apply(logits, processed, self._vocab_size)
            choices = greedy_choice(logits, self._vocab_size)
        last, chosen, healthy = self._judge(rows, logits, choices, highest, message.dists)
        kept = self._settle(rows, last)
        scores, prompt_scores = scorer.emitted(last, chosen), scorer.prompt()
        judging_s = forwarded.until(_moments.now(self._backend.device))
        try:
            self._hardware.finish()
        except EmulationTooSlow:
            if tries == 1:
                raise
            return self._round(message, tries - 1)
        if not healthy.all():
            reason = "the target's logits are not finite"
            return _failed(message.round, {int(row): reason for row in message.rows[healthy == 0]}, reason)
        drafted = Drafted.none() if self._beside is None else self._beside.draft(message, rows, kept, chosen)
        return Verdict(
            message.round,
            message.rows,
            message.epochs,
            kept,
            chosen.astype(np.int32),
            perf_counter() - began - judging_s - drafted.busy_s,
            judging_s,
            scores,
            prompt_scores,
            shown(message, rows, last, self._shows),
            drafted,
            last.astype(np.int32) if len(message.parents) else empty(),
            self._hardware.counted(),
        )

    def _settle(self, rows: Sequence[Row], last: Array) -> Array:
        """Make what is kept of every row what its history, its grammar and its KV hold; int32 [n] tokens kept."""
        paths = [row.path(node) for row, node in zip(rows, last.tolist(), strict=True)]
        trees = [(row, path) for row, path in zip(rows, paths, strict=True) if row.parents is not None]
        for row in rows:
            row.profile.wrote(row.first, row.chain.tolist() if row.parents is None else row.tokens_to(last[row.index]))
        for row, path in trees:
            if row.profile.constraint is not None:
                row.profile.constraint.write(row.first, row.chain[path].tolist())
        moves = [Move(row.table, row.first, [row.first + node for node in path]) for row, path in trees if path]
        if moves and self._trees is not None:
            self._trees.move(moves)
        return np.array([len(path) for path in paths], dtype=np.int32)

    def _judge_of(self, rule: RuleName) -> Judge:
        if rule not in self._judges:
            raise ProtocolError(f"no rule called {rule!r}; there are: {', '.join(self._judges)}")
        return self._judges[rule]

    def _tree_judge_of(self, rule: RuleName) -> TreeJudge:
        if rule not in self._tree_judges:
            raise ProtocolError(f"rule {rule!r} cannot check trees; there are: {', '.join(self._tree_judges)}")
        return self._tree_judges[rule]

    def _build_masks(self, rows: Sequence[Row]) -> Future[Masks]:
        """In another thread while the forward runs, where there is anything to build."""
        if any(row.profile.constraint is not None for row in rows):
            return self._mask_thread.submit(_masks.build, rows)
        nothing: Future[Masks] = Future()
        nothing.set_result(Masks())
        return nothing

    def _forward(self, rows: Sequence[Row]) -> torch.Tensor:
        if not rows:
            return torch.empty(0, self._backend.vocab_size, device=self._backend.device)
        return _memory.forward(self._backend, [row.stretch for row in rows])

    def _judge(
        self, rows: Sequence[Row], logits: torch.Tensor, choices: torch.Tensor, highest: torch.Tensor, dists: Dists
    ) -> Array:
        """The last kept drafted token, next and healthy of each row, int64 [3, n]; -1, -1, 1 where no token is due.

        choices int64 [m]: the likeliest id of each row of logits [m, V]; highest [m]: its value before any processor.
        """
        greedy, groups = grouped(rows, self._greedy_walks)
        judged = self._judge_by_rules(groups, logits, dists) if groups else ()
        chosen, highs, *told = host.read(choices, highest, *judged)
        outcome = np.full((3, len(rows)), -1)
        outcome[2] = _healthy(rows, highs)
        for group, verdict in zip(groups, told, strict=True):
            outcome[:2, group.places.numpy()] = verdict
        follow_choices(greedy, chosen, outcome[:2])
        return outcome

    def _judge_by_rules(self, groups: Sequence[Group], logits: torch.Tensor, dists: Dists) -> list[torch.Tensor]:
        """The last kept drafted token and the next one of each group's rows, int64 [2, B]."""
        needed = any(group.rule in self._rules and self._rules[group.rule].NEEDS_DISTS for group in groups)
        draft_dists = decode(dists if needed else Dists.none(), logits.shape[1], logits.device)
        return [torch.stack(self._judge_by_rule(group, logits, draft_dists)) for group in groups]

    def _judge_by_rule(
        self, group: Group, logits: torch.Tensor, draft_dists: Support
    ) -> tuple[torch.Tensor, torch.Tensor]:
        judge, settings, device = self._judge_of(group.rule), group.settings.take(group.owners), logits.device
        if len(group.logits) != len(logits):
            logits = logits[host.send(group.logits, device)]
        dist = process(logits, settings.temperature, settings.top_p, settings.top_k, self._vocab_size, settings.min_p)
        tokens = host.send(group.tokens, device)
        draft = DraftRows.of(draft_dists, host.send(group.dist_rows, device), tokens)
        tree = _tree_of(group, device)
        if tree is not None:
            return self._tree_judge_of(group.rule)(group.by_step(dist), draft, tree, group.noise(device))
        kept, chosen = judge(group.by_step(dist), draft, tokens, host.send(group.lengths, device), group.noise(device))
        return kept - 1, chosen


def _healthy(rows: Sequence[Row], highest: Array) -> Array:
    """Whether all logits of each row's due tokens are such that a token can be chosen, bool [n]; highest [m].

    The largest value of a row is not finite when it holds a NaN or +inf, or nothing but −inf.
    """
    sound = np.isfinite(highest)
    if sound.all():
        return np.ones(len(rows), bool)
    lengths = [len(row.chain) + 1 if row.due else 0 for row in rows]
    faults: Array = np.bincount(np.repeat(np.arange(len(rows)), lengths)[~sound], minlength=len(rows))
    return np.equal(faults, 0)


def _tree_of(group: Group, device: torch.device) -> DraftTree | None:
    if group.parents is None:
        return None
    return DraftTree(host.send(group.parents, device), host.send(group.tokens, device))


def _failed(round_id: int, faults: dict[int, str], reason: str = "") -> Failed:
    return Failed(round_id, np.array(list(faults), dtype=np.int64), reason or "; ".join(faults.values()))


def build(config: Config, ranks: RankGroup | None = None) -> tuple[Verifier, WorkerInfo]:
    """Load the target that the configuration names. Raises ConfigError for what cannot be loaded or does not fit."""
    speculator = _beside(config)
    if speculator is None:
        backend, info = load_backend(
            config.target,
            "target",
            config.engine,
            ranks=ranks,
            attach=lambda target, _: _showing_hidden(target, config),
        )
    elif ranks is not None:
        raise ConfigError(
            f"draft.speculator {config.draft.speculator} reads the whole target, of which each rank holds a part; "
            "set target.tensor_parallel to 1, or use another speculator"
        )
    else:
        slots = partial(_memory_plan.slot_bytes, config.draft, config.engine)
        attach = partial(speculator.attach, config)
        backend, info = load_backend(config.target, "target", config.engine, slots, attach=attach)
    grammars = Grammars(Tokenizer.load(prepare(config.target, log.info, role="target")))
    beside = None
    if speculator is not None:
        beside = Beside(speculator.worker(config, backend, info.vocab_size, grammars), config.engine.block_tokens)
    verifier = Verifier(
        backend,
        vocab_size=info.vocab_size,
        engine=config.engine,
        grammars=grammars,
        hardware=backend.hardware,
        beside=beside,
    )
    return verifier, replace(info, rules=verifier.rules, drafts=beside is not None)


def _beside(config: Config) -> Any | None:
    """The speculator's file, where it is one that lives here. Such a file has `attach` and `worker`."""
    speculator = config.draft.speculator
    if config.engine.depth == 0 or speculator == NO_SPECULATOR:
        return None
    found = folders.load("drafting", speculator)
    return found if getattr(found, "KIND", None) == "beside" else None


def _showing_hidden(backend: Backend, config: Config) -> Backend:
    """The target, which keeps what the speculator reads of it, if anything. Raises ConfigError where it cannot."""
    speculator = config.draft.speculator
    if config.engine.depth == 0 or speculator == NO_SPECULATOR:
        return backend
    layers_read: LayersRead | None = getattr(folders.load("drafting", speculator), "layers_read", None)
    if layers_read is None:
        return backend
    if not isinstance(backend, ShowsHidden):
        raise ConfigError(
            f"{speculator} reads the target's hidden states, which {config.target.source!r} does not show"
        )
    backend.observe(layers_read(config))
    return backend
