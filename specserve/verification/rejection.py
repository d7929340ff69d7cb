"""Token-level rejection sampling (Leviathan et al., 2023; Chen et al., 2023): lossless.

Drafted token t stays with probability min(1, target[t] / draft[t]). The first one refused is replaced by a draw from
what the target has over the draft, max(target - draft, 0); after a whole kept chain the target draws freely.
"""

from __future__ import annotations

from typing import Final

import torch

from specserve.config import EngineConfig
from specserve.sampling.dists import draw
from specserve.sampling.wire import Support
from specserve.types import DraftPicks
from specserve.verification import Judge, RuleNoise
from specserve.verification._chain import kept_length
from specserve.verification._draft_rows import DraftRows, draw_leftover, rows_at
from specserve.verification._kernels import judge_ratios
from specserve.verification._tree import DraftTree, by_place, judge_siblings

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
    """See `verification.Judge`. A token that its own draft dist holds impossible is refused."""
    said = judge_ratios("rejection", target, draft, tokens, lengths, noise.accept, noise.choose)
    return _judge_in_tensors(target, draft, tokens, lengths, noise) if said is None else said


def _judge_in_tensors(
    target: torch.Tensor, draft: DraftRows, tokens: torch.Tensor, lengths: torch.Tensor, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = kept_length(_accepted(target, draft, tokens, noise.accept), lengths)
    choose = noise.choose.gather(1, kept[:, None]).squeeze(1)
    if not draft.depth:
        return kept, draw(target[:, 0], choose)
    refused = draft.at(kept)
    less = torch.where((kept < lengths)[:, None], refused.probs, 0)
    return kept, draw_leftover(rows_at(target, kept), Support(refused.ids, less), choose)


def _accepted(target: torch.Tensor, draft: DraftRows, tokens: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """bool [B, K]. Multiplied, not divided, and strict: a token that the target holds impossible fails for noise 0."""
    target_mass = target[:, :-1].gather(2, tokens[..., None]).squeeze(2)
    draft_mass = draft.mass_of(tokens)
    return (noise * draft_mass < target_mass) & (draft_mass > 0)


def judge_tree(
    target: torch.Tensor, draft: DraftRows, tree: DraftTree, noise: RuleNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verification.TreeJudge`: siblings without replacement, as in `_tree.judge_siblings`."""
    return judge_siblings(target, by_place(draft, tree, target.shape[2]), tree, noise.accept, noise.choose)
