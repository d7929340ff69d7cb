"""What the workers remember of a request: how its tokens are chosen. Opened and closed by message, stamped by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specserve.errors import ProtocolError
from specserve.sampling.constraint import Constraint
from specserve.sampling.grammar import Grammars
from specserve.transport.messages import Close, Open


@dataclass(frozen=True, slots=True)
class Profile:
    """A request's choices; the fields as in `messages.Open`, the seed as a signed 64-bit integer.

    constraint is what holds a structured answer to its grammar: state of the row, not a choice.
    """

    epoch: int
    temperature: float
    top_p: float
    top_k: int
    rule: str
    seed: int
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Profiles by column, on the CPU: temperature and top_p float32 [n], top_k and seeds int64 [n]."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor

    @staticmethod
    def of(profiles: Sequence[Profile]) -> Settings:
        """The columns of these profiles, in order."""
        return Settings(
            torch.tensor([p.temperature for p in profiles], dtype=torch.float32),
            torch.tensor([p.top_p for p in profiles], dtype=torch.float32),
            torch.tensor([p.top_k for p in profiles], dtype=torch.int64),
            torch.tensor([p.seed for p in profiles], dtype=torch.int64),
        )

    def take(self, rows: torch.Tensor) -> Settings:
        """The settings of some rows, int64 [m] on the CPU; a row may be named more than once."""
        return Settings(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.seeds[rows])


class Profiles:
    """The open rows of one worker. Without grammars, rows of structured requests are open but cannot be served."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._open: dict[int, Profile] = {}
        self._grammars = grammars

    def open(self, message: Open) -> None:
        """Remember a row; a second open of the same row replaces the first."""
        self._open[message.row] = Profile(
            message.epoch,
            message.temperature,
            message.top_p,
            message.top_k,
            message.rule,
            _signed(message.seed),
            self._constraint(message),
        )

    def _constraint(self, message: Open) -> Constraint | None:
        if message.structured is None:
            return None
        return Constraint(message.structured, self._grammars, message.tokens.tolist(), message.prompt_length)

    def close(self, message: Close) -> None:
        """Forget a row, if it is known."""
        self._open.pop(message.row, None)

    def find(self, row: int, epoch: int) -> Profile:
        """The profile of a row. Raises ProtocolError when it was never opened, or opened with another epoch."""
        profile = self._open.get(row)
        if profile is None:
            raise ProtocolError(f"row {row} is not open")
        if profile.epoch != epoch:
            raise ProtocolError(f"row {row} is open with epoch {profile.epoch}, not {epoch}")
        return profile


def _signed(seed: int) -> int:
    """Any integer as the signed 64-bit integer with the same low bits."""
    return (seed + 2**63) % 2**64 - 2**63
