"""Parts that rules share: walking a chain until something is refused."""

from __future__ import annotations

import torch


def kept_length(passed: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int64 [B]: how many of the first `lengths` [B] entries of passed bool [B, K] are set before the first unset."""
    within = torch.arange(passed.shape[1], device=passed.device) < lengths[:, None]
    return (passed & within).long().cumprod(-1).sum(-1)


def judge_greedy(
    choices: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What every rule says where the target dist is one-hot at choices int64 [B, K + 1]: keep while equal.

    tokens int64 [B, K], of which the first `lengths` [B] count. Returns kept and next, int64 [B] each.
    """
    kept = kept_length(choices[:, :-1] == tokens, lengths)
    return kept, choices.gather(1, kept[:, None]).squeeze(1)
