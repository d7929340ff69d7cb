"""Keep while equal: the target draws its own token at each position, and a drafted token stays while it is that one.

Lossless for any way of drafting that does not look at the target's noise. The noise is keyed by position, so given
equal target dists a seeded answer is the same with any draft, any depth, or none.
"""

from __future__ import annotations

from typing import Final

import torch

from specserve.config import EngineConfig
from specserve.sampling.dists import draw
from specserve.types import DraftPicks
from specserve.verification import Judge, RuleNoise
from specserve.verification._chain import judge_greedy
from specserve.verification._draft_rows import DraftRows
from specserve.verification._kernels import judge_exact
from specserve.verification._tree import DraftTree, follow

DRAFT_PICKS: Final[DraftPicks] = "argmax"
NEEDS_DISTS: Final[bool] = False
LOSSLESS: Final[bool] = True
GREEDY_WALK: Final[bool] = True


def build(engine: EngineConfig) -> Judge:
    """See `verification`; there is nothing to configure."""
    return judge


def judge(
    target: torch.Tensor, draft: DraftRows, tokens: torch.Tensor, lengths: torch.Tensor, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verification.Judge`. The draft dists have no influence."""
    said = judge_exact(target, tokens, lengths, noise.choose)
    return judge_greedy(_choices(target, noise.choose), tokens, lengths) if said is None else said


def judge_tree(
    target: torch.Tensor, draft: DraftRows, tree: DraftTree, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verification.TreeJudge`. Places of one depth share their noise, as a walk looks at one of them only."""
    return follow(_choices(target, noise.choose), tree)


def _choices(target: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return draw(target.flatten(0, 1), noise.flatten()).view(noise.shape)
