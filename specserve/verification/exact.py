"""Keep while equal: the target draws its own token at each position, and a drafted token stays while it is that one.

Lossless for any way of drafting that does not look at the target's noise. The noise is keyed by position, so given
equal target dists a seeded answer is the same with any draft, any depth, or none.
"""

from __future__ import annotations

from typing import Final

import torch

from specserve.sampling.dists import draw
from specserve.verification import DraftPicks, RuleNoise
from specserve.verification._chain import judge_greedy

DRAFT_PICKS: Final[DraftPicks] = "argmax"
NEEDS_DISTS: Final[bool] = False


def judge(
    target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verification.Judge`. The draft dists have no influence; draft may be [B, K, 0]."""
    choices = draw(target.flatten(0, 1), noise.choose.flatten()).view(noise.choose.shape)
    return judge_greedy(choices, tokens, lengths)
