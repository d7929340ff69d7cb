"""What the workers remember of a request: how its tokens are chosen. Opened and closed by message, stamped by epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specserve.errors import ProtocolError
from specserve.sampling.constraint import Constraint
from specserve.sampling.grammar import Grammars
from specserve.sampling.history import History
from specserve.sampling.processors import Processors
from specserve.transport.messages import Close, Open

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Profile:
    """A request's choices; the fields as in `messages.Open`, the seed as a signed 64-bit integer.

    processors is None where the request uses none. prompt holds its tokens where they are to be scored.
    constraint is what holds a structured answer to its grammar: state of the row, not a choice.
    """

    epoch: int
    temperature: float
    top_p: float
    top_k: int
    rule: str
    seed: int
    branch: int = 0
    min_p: float = 0.0
    processors: Processors | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt: tuple[int, ...] = ()
    constraint: Constraint | None = None

    def wrote(self, start: int, tokens: Sequence[int]) -> None:
        """These tokens stand from absolute position `start` on; what was known past them is void, as for KV.

        Raises ProtocolError when the tokens before `start` are not known.
        """
        if self.processors is not None:
            self.processors.history.write(start, tokens)


@dataclass(frozen=True, slots=True)
class Settings:
    """Profiles by column, on the CPU: temperature, top_p and min_p float32 [n], top_k, seeds, branches int64 [n]."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor
    branches: torch.Tensor
    min_p: torch.Tensor

    @staticmethod
    def of(profiles: Sequence[Profile]) -> Settings:
        """The columns of these profiles, in order."""
        return Settings(
            torch.tensor([p.temperature for p in profiles], dtype=torch.float32),
            torch.tensor([p.top_p for p in profiles], dtype=torch.float32),
            torch.tensor([p.top_k for p in profiles], dtype=torch.int64),
            torch.tensor([p.seed for p in profiles], dtype=torch.int64),
            torch.tensor([p.branch for p in profiles], dtype=torch.int64),
            torch.tensor([p.min_p for p in profiles], dtype=torch.float32),
        )

    def take(self, rows: torch.Tensor) -> Settings:
        """The settings of some rows, int64 [m] on the CPU; a row may be named more than once."""
        return Settings(
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.seeds[rows],
            self.branches[rows],
            self.min_p[rows],
        )


class Profiles:
    """The open rows of one worker. Without grammars, rows of structured requests are open but cannot be served."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._open: dict[int, Profile] = {}
        self._drafted: dict[int, tuple[int, set[int]]] = {}
        self._grammars = grammars

    def open(self, message: Open) -> None:
        """Remember a row; a second open of the same row replaces the first.

        Never raises: a row that cannot be opened stays closed, and what is asked of it later fails for it alone.
        """
        self._open.pop(message.row, None)
        self._drafted.pop(message.row, None)
        try:
            self._open[message.row] = self._profile(message)
        except Exception:  # whatever one request provokes must not end the worker
            log.exception("row %d cannot be opened", message.row)

    def _profile(self, message: Open) -> Profile:
        sampling = message.sampling
        return Profile(
            message.epoch,
            # Rounded once: a temperature that float32 takes for 0 is greedy to everybody who asks.
            float(np.float32(sampling.temperature)),
            sampling.top_p,
            sampling.top_k,
            message.rule,
            _signed(message.seed),
            message.branch,
            sampling.min_p,
            _processors(message),
            message.logprobs,
            message.prompt_logprobs,
            () if message.prompt_logprobs is None else tuple(message.tokens[: message.prompt_length].tolist()),
            self._constraint(message),
        )

    def _constraint(self, message: Open) -> Constraint | None:
        if message.structured is None:
            return None
        return Constraint(message.structured, self._grammars, message.tokens.tolist(), message.prompt_length)

    def close(self, message: Close) -> None:
        """Forget a row, if it is known."""
        self._open.pop(message.row, None)
        self._drafted.pop(message.row, None)

    def drafted(self, row: int, plan: int, slots: Iterable[int]) -> None:
        """These slots' tokens were drafted for an open row in this plan; what plans before made is forgotten."""
        known = self._drafted.get(row)
        if known is None or known[0] != plan:
            known = self._drafted[row] = plan, set()
        known[1].update(slots)

    def has_drafted(self, row: int, plan: int, slot: int) -> bool:
        """Whether the token of this slot was made in that plan, and in no other since."""
        known = self._drafted.get(row)
        return known is not None and known[0] == plan and slot in known[1]

    def find(self, row: int, epoch: int) -> Profile:
        """The profile of a row. Raises ProtocolError when it was never opened, or opened with another epoch."""
        profile = self._open.get(row)
        if profile is None:
            raise ProtocolError(f"row {row} is not open")
        if profile.epoch != epoch:
            raise ProtocolError(f"row {row} is open with epoch {profile.epoch}, not {epoch}")
        return profile


def _processors(message: Open) -> Processors | None:
    if not Processors.wanted(message.sampling):
        return None
    return Processors(message.sampling, message.end_tokens, History(message.tokens, message.prompt_length))


def _signed(seed: int) -> int:
    """Any integer as the signed 64-bit integer with the same low bits."""
    return (seed + 2**63) % 2**64 - 2**63
