"""Made-up acceptance, FOR BENCHMARKS ONLY: drafted tokens are kept at given rates, whatever they are.

It costs what a real rule costs around it and keeps what it is told to keep, so that one can ask how fast a pipeline
would be with a better draft. The text is worthless. It has to be configured by `engine.synthetic_acceptance`: the share
of rounds that keep at least 1, 2, … tokens; none are kept beyond the last share given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.sampling.dists import draw
from specserve.types import DraftPicks
from specserve.verification import Judge, RuleNoise
from specserve.verification._chain import kept_length
from specserve.verification._draft_rows import DraftRows, rows_at

DRAFT_PICKS: Final[DraftPicks] = "argmax"
NEEDS_DISTS: Final[bool] = False
LOSSLESS: Final[bool] = False
GREEDY_WALK: Final[bool] = False


def build(engine: EngineConfig) -> Judge:
    """See `verification`. Raises ConfigError unless a profile is configured."""
    if engine.synthetic_acceptance is None:
        raise ConfigError(
            "the rule synthetic makes up how many drafted tokens are kept; where that is wanted, for a benchmark, "
            "set engine.synthetic_acceptance, e.g. [0.8, 0.6, 0.5]"
        )
    return _Synthetic(engine.synthetic_acceptance)


class _Synthetic:
    """A `Judge` by shares: rates[i] of rounds keep more than i tokens."""

    def __init__(self, rates: Sequence[float]) -> None:
        before = (1.0, *rates)
        # The chance of token i, given that the tokens before it were kept.
        self._chances = [rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=False)]

    def __call__(
        self, target: torch.Tensor, draft: DraftRows, tokens: torch.Tensor, lengths: torch.Tensor, noise: RuleNoise
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `verification.Judge`. Neither tokens nor dists decide what is kept."""
        depth = tokens.shape[1]
        chances = (self._chances + [0.0] * depth)[:depth]
        kept = kept_length(noise.accept < noise.accept.new_tensor(chances), lengths)
        return kept, draw(rows_at(target, kept), noise.choose.gather(1, kept[:, None]).squeeze(1))
