"""ONE FILE PER RULE: how the target decides which drafted tokens stay and which token comes next.

A rule file holds a function `judge` (see `Rule`) and two constants that the workers read when they start:

DRAFT_PICKS   "sampling": drafted tokens are drawn from the draft dist; "argmax": they are its likeliest tokens
NEEDS_DISTS   whether the target must know the dists that drafted tokens were drawn from

Every rule that is called lossless puts out tokens with exactly the target dist's joint law; the tests prove it by
enumeration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

NOT_CHOICES = frozenset({"bookkeeping", "verifier"})

DraftPicks = Literal["sampling", "argmax"]


@dataclass(frozen=True, slots=True)
class RuleNoise:
    """Uniforms in [0, 1) by chain position j, keyed by the absolute position of the token in question.

    accept float64 [B, K] tests drafted token j; choose float64 [B, K + 1] picks the target's own token j.
    """

    accept: torch.Tensor
    choose: torch.Tensor


class Judge(Protocol):
    """The function of a rule: pure, and computed in the dtype of its dists (never less)."""

    def __call__(
        self,
        target: torch.Tensor,
        draft: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        noise: RuleNoise,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many drafted tokens each row keeps, int64 [B], and the token after them, int64 [B].

        target [B, K + 1, V]: row j is the target dist of token j, given the drafted tokens before it. draft [B, K, V]:
        the dist that token j was drawn from, one-hot where it was chosen without chance. tokens int64 [B, K];
        lengths int64 [B], at most K. Whatever stands past a row's length has no influence.
        """
        ...


class Rule(Protocol):
    """What `folders.load("verification", name)` returns."""

    DRAFT_PICKS: DraftPicks
    NEEDS_DISTS: bool

    @property
    def judge(self) -> Judge:
        """The decision."""
        ...
