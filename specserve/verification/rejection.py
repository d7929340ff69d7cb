"""Token-level rejection sampling (Leviathan et al., 2023; Chen et al., 2023): lossless.

Drafted token t stays with probability min(1, target[t] / draft[t]). The first one refused is replaced by a draw from
what the target has over the draft, max(target - draft, 0); after a whole kept chain the target draws freely.
"""

from __future__ import annotations

from typing import Final

import torch

from specserve.sampling.dists import draw
from specserve.verification import DraftPicks, RuleNoise
from specserve.verification._chain import kept_length

DRAFT_PICKS: Final[DraftPicks] = "sampling"
NEEDS_DISTS: Final[bool] = True


def judge(
    target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verification.Judge`. A token that its own draft dist holds impossible is refused."""
    kept = kept_length(_accepted(target, draft, tokens, noise.accept), lengths)
    weights = _leftover(target, draft, kept, lengths)
    return kept, draw(weights, noise.choose.gather(1, kept[:, None]).squeeze(1))


def _accepted(target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """bool [B, K]. Multiplied, not divided, and strict: a token that the target holds impossible fails for noise 0."""
    here = tokens[..., None]
    target_mass = target[:, :-1].gather(2, here).squeeze(2)
    draft_mass = draft.gather(2, here).squeeze(2)
    return (noise * draft_mass < target_mass) & (draft_mass > 0)


def _leftover(target: torch.Tensor, draft: torch.Tensor, kept: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Weights [B, V] of the next token: the target's row less the draft's, which is zero after a whole kept chain."""
    rows = torch.arange(len(kept), device=kept.device)
    target_row = target[rows, kept]
    if draft.shape[1] == 0:
        return target_row
    refused = (kept < lengths)[:, None]
    draft_row = draft[rows, kept.clamp(max=draft.shape[1] - 1)]
    residual = torch.where(refused, (target_row - draft_row).clamp(min=0), target_row)
    # Equal dists leave nothing over but for rounding; then the target's own row is the right one.
    return torch.where(residual.any(-1, keepdim=True), residual, target_row)
