"""The cross-entropy of drafted places to what the target says there, without keeping anything of the vocabulary's size.

Rows are taken a few at a time, so that logits, dists and their differences stay in the caches of a CPU; the gradient
with respect to the states is worked out on the way, as Liger's fused losses do (Hsu et al. 2024). The target's goal is
computed once for all places that aim at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ROWS_AT_ONCE = 128


def cross_entropies(
    places: Sequence[torch.Tensor],
    target: torch.Tensor,
    head: torch.Tensor,
    weights: torch.Tensor,
    greedy_share: float,
) -> torch.Tensor:
    """float32 [places]: each place's sum over rows of weight times cross-entropy.

    places: the student's states, each [N, width]; target [N, width], the target's there; head [m, width], frozen;
    weights float32 [N]. The goal is the target's dist, mixed with greedy_share of its likeliest token.
    """
    found: torch.Tensor = _CrossEntropies.apply(target, head, weights, greedy_share, *places)  # type: ignore[no-untyped-call]
    return found


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        target: torch.Tensor,
        head: torch.Tensor,
        weights: torch.Tensor,
        greedy_share: float,
        *places: torch.Tensor,
    ) -> torch.Tensor:
        sums = torch.zeros(len(places), device=head.device)
        slopes = [torch.empty_like(states) for states in places]
        for begin in range(0, len(target), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            goal, weight = _goal(logits_of(target[rows], head), greedy_share), weights[rows]
            for place, states in enumerate(places):
                logits = logits_of(states[rows], head)
                scale = torch.logsumexp(logits, -1)
                sums[place] += ((scale - torch.linalg.vecdot(goal, logits)) * weight).sum()
                slope = logits.sub_(scale[:, None]).exp_().sub_(goal).mul_(weight[:, None])
                slopes[place][rows] = (slope.to(head.dtype) @ head).to(states.dtype)
        ctx.save_for_backward(*slopes)
        return sums

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slopes = ctx.saved_tensors
        return (None, None, None, None, *(slope * gradients[place] for place, slope in enumerate(slopes)))


def logits_of(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """float32 [..., m] of states [..., width] and a head [m, width], in the head's precision."""
    return (states.to(head.dtype) @ head.t()).float()


def _goal(logits: torch.Tensor, greedy_share: float) -> torch.Tensor:
    """What is aimed at: the dist of these logits [N, m], mixed with its likeliest token."""
    goal = torch.softmax(logits, -1)
    best = goal.argmax(-1, keepdim=True)
    return goal.mul_(1 - greedy_share).scatter_add_(1, best, torch.full_like(best, greedy_share, dtype=goal.dtype))
