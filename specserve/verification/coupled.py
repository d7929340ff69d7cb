"""Draft and target share their noise (Daliri et al., "Coupling without communication and drafter-invariant speculative
decoding", arXiv 2408.07978).

At each position both pick argmax(log own dist + G), with standard Gumbel noise G keyed by seed, branch, absolute
position and target token id. A drafted token stays while it is the target's pick, and what comes out is always the
target's own picks: lossless whatever is drafted, and given equal target dists a seeded answer is the same with any
draft, at any depth, alone or in company, after any restart. Of one dist they agree always; in general with a
probability of at least (1 - d) / (1 + d), where d is the total variation distance. `rejection` keeps with 1 - d.
"""

from __future__ import annotations

from typing import Final

import torch

from specserve.config import EngineConfig
from specserve.sampling.race import race
from specserve.types import DraftPicks
from specserve.verification import Judge, RuleNoise
from specserve.verification._chain import judge_greedy
from specserve.verification._draft_rows import DraftRows
from specserve.verification._kernels import judge_coupled
from specserve.verification._tree import DraftTree, follow

DRAFT_PICKS: Final[DraftPicks] = "shared_noise"
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
    said = judge_coupled(target, tokens, lengths, noise.keys)
    return judge_greedy(_choices(target, noise.keys), tokens, lengths) if said is None else said


def judge_tree(
    target: torch.Tensor, draft: DraftRows, tree: DraftTree, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verification.TreeJudge`. Places of one depth share their keys, so a pick does not depend on the tree."""
    return follow(_choices(target, noise.keys), tree)


def _choices(target: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return race(target.flatten(0, 1), keys.flatten(0, 1)).view(keys.shape[:2])
