"""Typical acceptance (Cai et al., "Medusa", 2024): LOSSY. It keeps what is plausible, not what the target would draw.

A likeliest drafted token t stays while target[t] > min(FLOOR, SHARE · exp(-H)), with H the entropy of the target dist
in nats: the less certain the target, the less is asked of a draft. The token after them is drawn from the target dist.
The answers do not have the target's law; at temperature 0 they are the target's own.
"""

from __future__ import annotations

from typing import Final

import torch

from specserve.config import EngineConfig
from specserve.sampling.dists import draw
from specserve.types import DraftPicks
from specserve.verification import Judge, RuleNoise
from specserve.verification._chain import kept_length
from specserve.verification._draft_rows import DraftRows, rows_at
from specserve.verification._kernels import judge_typical

DRAFT_PICKS: Final[DraftPicks] = "argmax"
NEEDS_DISTS: Final[bool] = False
LOSSLESS: Final[bool] = False
GREEDY_WALK: Final[bool] = True

FLOOR: Final[float] = 0.09
SHARE: Final[float] = 0.3


def build(engine: EngineConfig) -> Judge:
    """See `verification`; there is nothing to configure."""
    return judge


def judge(
    target: torch.Tensor, draft: DraftRows, tokens: torch.Tensor, lengths: torch.Tensor, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verification.Judge`. The draft dists have no influence."""
    said = judge_typical(target, tokens, lengths, noise.choose, FLOOR, SHARE)
    return _judge_in_tensors(target, tokens, lengths, noise) if said is None else said


def _judge_in_tensors(
    target: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    offered = target[:, :-1]
    mass = offered.gather(2, tokens[..., None]).squeeze(2)
    threshold = (SHARE * torch.exp(-_entropy(offered))).clamp(max=FLOOR)
    kept = kept_length(mass > threshold, lengths)
    return kept, draw(rows_at(target, kept), noise.choose.gather(1, kept[:, None]).squeeze(1))


def _entropy(dists: torch.Tensor) -> torch.Tensor:
    """[B, K] in nats, of dists [B, K, V]."""
    smallest = torch.finfo(dists.dtype).tiny
    return -dists.clamp(min=smallest).log_().mul_(dists).sum(-1)
