"""Block verification (Sun et al., arXiv 2403.10444): lossless, and never fewer kept tokens than `rejection` expects.

A chain is judged as a whole. Its weight after token i is w_i = min(1, w_(i-1) · target[t_i] / draft[t_i]), w_0 = 1.
With S_i = Σ max(w_i · target - draft, 0) over the dists of the token after i, length i passes with probability
h_i = S_i / (S_i + 1 - w_i), and the whole chain with h_K = w_K. The longest length that passes is kept, whatever the
shorter ones say; after it comes a draw from max(w_i · target - draft, 0), or from the target after the whole chain.
"""

from __future__ import annotations

from typing import Final

import torch

from specserve.config import EngineConfig
from specserve.sampling.dists import draw
from specserve.sampling.wire import Support
from specserve.types import DraftPicks
from specserve.verification import Judge, RuleNoise
from specserve.verification._draft_rows import DraftRows, draw_leftover, rows_at
from specserve.verification._kernels import judge_ratios

DRAFT_PICKS: Final[DraftPicks] = "sampling"
NEEDS_DISTS: Final[bool] = True
LOSSLESS: Final[bool] = True
GREEDY_WALK: Final[bool] = True


def build(engine: EngineConfig) -> Judge:
    """See `verification`; there is nothing to configure."""
    return judge


def judge(
    target: torch.Tensor, draft: DraftRows, tokens: torch.Tensor, lengths: torch.Tensor, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verification.Judge`. A token that its own draft dist holds impossible ends what can be kept."""
    said = judge_ratios("block", target, draft, tokens, lengths, noise.accept, noise.choose)
    return _judge_in_tensors(target, draft, tokens, lengths, noise) if said is None else said


def _judge_in_tensors(
    target: torch.Tensor, draft: DraftRows, tokens: torch.Tensor, lengths: torch.Tensor, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    if not draft.depth:
        return torch.zeros_like(lengths), draw(target[:, 0], noise.choose[:, 0])
    weights = _weights(target, draft, tokens)
    kept = _longest(noise.accept < _pass_probability(target, draft, weights, lengths), lengths)
    weight = weights.gather(1, kept[:, None])
    refused = draft.at(kept)
    short = (kept < lengths)[:, None]
    # After a whole kept chain nothing is taken away, and the scale does not matter.
    scaled = rows_at(target, kept).mul_(torch.where(short, weight, 1).to(target.dtype))
    less = Support(refused.ids, torch.where(short, refused.probs, 0))
    return kept, draw_leftover(scaled, less, noise.choose.gather(1, kept[:, None]).squeeze(1))


def _weights(target: torch.Tensor, draft: DraftRows, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [B, K + 1]: w_0 … w_K."""
    target_mass = target[:, :-1].gather(2, tokens[..., None]).squeeze(2).double()
    draft_mass = draft.mass_of(tokens).double()
    ratios = torch.where(draft_mass > 0, target_mass / draft_mass, 0)
    weights = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios.unbind(1):
        weights.append((weights[-1] * ratio).clamp(max=1))
    return torch.stack(weights, 1)


def _pass_probability(
    target: torch.Tensor, draft: DraftRows, weights: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """float64 [B, K]: h_1 … h_K, where h of a row's own length is w.

    S_i = w_i - Σ min(w_i · target, draft), so that only ids with draft mass are looked at.
    """
    at_ids = target[:, :-1].gather(2, draft.ids).double()
    overlap = torch.minimum(weights[:, :-1, None] * at_ids, draft.probs.double()).sum(-1)
    left = (weights[:, :-1] - overlap).clamp(min=0)[:, 1:]
    missing = 1 - weights[:, 1:-1]
    # A weight of 1 passes for sure, also where nothing is left over: 0 / 0 is 1 here.
    inner = torch.where(missing > 0, left / (left + missing), 1)
    whole = torch.arange(1, weights.shape[1], device=lengths.device) == lengths[:, None]
    return torch.where(whole, weights[:, 1:], torch.nn.functional.pad(inner, (0, 1)))


def _longest(passed: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int64 [B]: the largest i at most lengths [B] for which passed[i - 1] of bool [B, K] is set, or 0."""
    places = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    return torch.where(passed & (places <= lengths[:, None]), places, 0).amax(-1)
