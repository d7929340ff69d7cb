"""The verifier: one ragged forward of the target per round, then each row's rule, then one copy to the host.

Rows of prefill and decode share the forward. A row whose feed ends at absolute position e has its target rows
j = 0 … K at e + 1 + j; noise is keyed by that position, here as in the draft worker.

A `Verify` is answered by one message: the `Verdict` of all its rows, or a `Failed` that names the rows at fault, or
none when the round as a whole could not be computed. Sending the other rows again costs time only: noise is keyed by
position, so they get the verdict that they would have had.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import cast

import numpy as np
import torch

from specserve import folders
from specserve.config import Config
from specserve.models import Backend
from specserve.models._stretches import ragged
from specserve.models._worker import load_backend
from specserve.models.loading import prepare
from specserve.sampling.constraint import restrict
from specserve.sampling.dists import greedy_choice, process
from specserve.sampling.grammar import Grammars
from specserve.sampling.profiles import Profiles
from specserve.sampling.wire import decode
from specserve.text import Tokenizer
from specserve.transport.messages import Array, Close, Dists, Failed, Message, Open, Verdict, Verify
from specserve.types import WorkerInfo
from specserve.verification import Rule, _masks
from specserve.verification._chain import judge_greedy
from specserve.verification._group import GREEDY, Group, grouped
from specserve.verification._masks import Masks
from specserve.verification._rows import Row, read

_log = logging.getLogger("specserve")


class Verifier:
    """A `transport.Worker` that holds the target. Never raises from `handle`.

    vocab_size is the size of the vocabulary that draft and target share; ids at or above it are never chosen.
    grammars are needed for structured requests only.
    """

    def __init__(self, backend: Backend, *, vocab_size: int, grammars: Grammars | None = None) -> None:
        self._backend = backend
        self._vocab_size = min(vocab_size, backend.vocab_size)
        self._profiles = Profiles(grammars)
        self._rules: dict[str, Rule] = {}
        self._mask_thread = ThreadPoolExecutor(1, "specserve-masks")

    def handle(self, message: Message) -> list[Message]:
        """Answer `Open` and `Close` with nothing, `Verify` as the module says, anything else with `Failed`."""
        match message:
            case Open():
                self._profiles.open(message)
                return []
            case Close():
                self._profiles.close(message)
                return []
            case Verify():
                return [self._verify(message)]
        return [_failed(-1, {}, f"a verifier does not understand {type(message).__name__}")]

    def _verify(self, message: Verify) -> Message:
        try:
            with torch.inference_mode():
                return self._round(message)
        except Exception as error:  # whatever one batch provokes must not end the worker
            return _failed(message.round, {}, f"{type(error).__name__}: {error}")

    def _round(self, message: Verify) -> Message:
        began = perf_counter()
        rows, faults = read(message, self._profiles, self._backend.vocab_size)
        if faults:
            return _failed(message.round, faults)
        building = self._build_masks(rows)
        logits = self._forward(rows)
        forwarded = perf_counter()
        masks = building.result()
        if masks.faults:
            return _failed(message.round, {int(message.rows[i]): why for i, why in masks.faults.items()})
        logits = restrict(logits, masks.rows, masks.bits)
        kept, chosen, healthy = self._judge(rows, logits, message.dists)
        judged = perf_counter()
        if not healthy.all():
            reason = "the target's logits are not finite"
            return _failed(message.round, {int(row): reason for row in message.rows[healthy == 0]}, reason)
        return Verdict(
            message.round,
            message.rows,
            message.epochs,
            kept.astype(np.int32),
            chosen.astype(np.int32),
            forwarded - began,
            judged - forwarded,
        )

    def _build_masks(self, rows: Sequence[Row]) -> Future[Masks]:
        """In another thread while the forward runs, where there is anything to build."""
        if any(row.profile.constraint is not None for row in rows):
            return self._mask_thread.submit(_masks.build, rows)
        nothing: Future[Masks] = Future()
        nothing.set_result(Masks())
        return nothing

    def _rule(self, name: str) -> Rule:
        if name not in self._rules:
            self._rules[name] = cast(Rule, folders.load("verification", name))
        return self._rules[name]

    def _forward(self, rows: Sequence[Row]) -> torch.Tensor:
        if not rows:
            return torch.empty(0, self._backend.vocab_size, device=self._backend.device)
        logits = self._backend.forward(ragged([row.stretch for row in rows]))
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        return logits

    def _judge(self, rows: Sequence[Row], logits: torch.Tensor, dists: Dists) -> Array:
        """kept, next and healthy of each row, int64 [3, n]; 0, -1 and 1 where no token is due."""
        groups = grouped(rows)
        outcome = torch.tensor([[0], [-1], [1]], device=logits.device).repeat(1, len(rows))
        draft_dists = self._draft_dists(groups, dists, logits)
        for group in groups:
            mine = logits if len(group.logits) == len(logits) else logits[group.logits.to(logits.device)]
            if group.rule == GREEDY:
                kept, chosen = self._judge_greedy(group, mine)
            else:
                kept, chosen = self._judge_by_rule(group, mine, draft_dists)
            # The largest value of a row is not finite when it holds a NaN or +inf, or nothing but -inf.
            finite = group.by_step(mine[:, : self._vocab_size].amax(-1).isfinite()).all(-1)
            outcome[:, group.places.to(outcome.device)] = torch.stack([kept, chosen, finite.long()])
        return outcome.cpu().numpy()

    def _draft_dists(self, groups: Sequence[Group], dists: Dists, logits: torch.Tensor) -> torch.Tensor:
        """float32 [n, V]; n is 0 when no row of the round needs them."""
        needed = any(group.rule != GREEDY and self._rule(group.rule).NEEDS_DISTS for group in groups)
        return decode(dists if needed else Dists.none(), logits.shape[1], logits.device)

    def _judge_greedy(self, group: Group, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        choices = group.by_step(greedy_choice(logits, self._vocab_size))
        return judge_greedy(choices, group.tokens.to(logits.device), group.lengths.to(logits.device))

    def _judge_by_rule(
        self, group: Group, logits: torch.Tensor, draft_dists: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rule, settings, device = self._rule(group.rule), group.settings.take(group.owners), logits.device
        dist = process(logits, settings.temperature, settings.top_p, settings.top_k, self._vocab_size)
        draft = group.draft(draft_dists) if rule.NEEDS_DISTS else dist.new_empty(*group.tokens.shape, 0)
        return rule.judge(
            group.by_step(dist), draft, group.tokens.to(device), group.lengths.to(device), group.noise(device)
        )


def _failed(round_id: int, faults: dict[int, str], reason: str = "") -> Failed:
    return Failed(round_id, np.array(list(faults), dtype=np.int64), reason or "; ".join(faults.values()))


def build(config: Config) -> tuple[Verifier, WorkerInfo]:
    """Load the target that the configuration names. Raises ConfigError for what cannot be loaded or does not fit."""
    backend, info = load_backend(config.target, "target", config.engine.block_tokens)
    grammars = Grammars(Tokenizer.load(prepare(config.target, _log.info, role="target")))
    return Verifier(backend, vocab_size=info.vocab_size, grammars=grammars), info
