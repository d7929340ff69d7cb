"""Parts that rules share: walking a chain until something is refused."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from specserve.verification.bookkeeping import NO_TOKEN, verify_speculative_tokens


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
    rows, width = choices.shape
    offered = torch.arange(width - 1, device=tokens.device) < lengths[:, None]
    read = pad(tokens.masked_fill(~offered, NO_TOKEN), (1, 0))  # the target never chooses what is not offered
    last, _ = verify_speculative_tokens(read, choices, torch.full_like(lengths, width))
    return last - torch.arange(rows, device=last.device) * width, choices.flatten()[last]
