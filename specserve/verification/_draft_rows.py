"""The dists that drafted tokens were drawn from, by the ids that have mass; never spread out to a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specserve.sampling.dists import draw, draw_where_possible
from specserve.sampling.wire import Support


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One dist per drafted token: ids int64 [B, K, k] and probs [B, K, k], 0 for unused entries."""

    ids: torch.Tensor
    probs: torch.Tensor

    @staticmethod
    def of(support: Support, rows: torch.Tensor, tokens: torch.Tensor) -> DraftRows:
        """The dists at rows int64 [B, K] of the support; all mass on the token of tokens [B, K] where the row is -1."""
        if not len(support.ids):
            return DraftRows.certain(tokens, support.probs.dtype)
        chance, at = (rows >= 0)[..., None], rows.clamp(min=0)
        first = torch.arange(support.ids.shape[1], device=tokens.device) == 0
        ids = torch.where(chance, support.ids[at], torch.where(first, tokens[..., None], 0))
        return DraftRows(ids, torch.where(chance, support.probs[at], first.to(support.probs.dtype)))

    @staticmethod
    def certain(tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> DraftRows:
        """All mass on tokens [B, K]."""
        return DraftRows(tokens[..., None], torch.ones(*tokens.shape, 1, dtype=dtype, device=tokens.device))

    @staticmethod
    def whole(dist: torch.Tensor) -> DraftRows:
        """From dists over all ids, [B, K, V]."""
        return DraftRows(torch.arange(dist.shape[2], device=dist.device).expand(dist.shape), dist)

    @property
    def depth(self) -> int:
        """K."""
        return self.ids.shape[1]

    def mass_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, K]: the probability of token j in its own dist."""
        return torch.where(self.ids == tokens[..., None], self.probs, 0).sum(-1)

    def at(self, steps: torch.Tensor) -> Support:
        """The dists at chain position steps int64 [B], the last one where there are fewer."""
        rows = torch.arange(len(steps), device=steps.device)
        steps = steps.clamp(max=self.depth - 1)
        return Support(self.ids[rows, steps], self.probs[rows, steps])


def rows_at(target: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """[B, V]: row steps[b] of target [B, K + 1, V], copied."""
    rows = torch.arange(len(steps), device=steps.device) * target.shape[1] + steps
    return target.flatten(0, 1).index_select(0, rows)


def draw_leftover(weights: torch.Tensor, less: Support, noise: torch.Tensor) -> torch.Tensor:
    """int64 [B]: drawn from max(weights - less, 0), by uniforms [B]; from the weights where nothing is left over.

    weights [B, V] are overwritten with what is left over. Nothing is left over, but for rounding, of equal dists; then
    all of the weights are on the ids of `less`, since they would be left over elsewhere.
    """
    here = weights.gather(1, less.ids)
    # Unused entries share an id with a possible real one, so the differences are added, not written.
    weights.scatter_add_(1, less.ids, -torch.minimum(here, less.probs))
    picked, possible = draw_where_possible(weights, noise)
    if possible.is_cpu and bool(possible.all()):  # nearly always; a device draws again sooner than it is asked
        return picked
    instead = less.ids.gather(1, draw(torch.where(less.probs > 0, here, 0), noise)[:, None]).squeeze(1)
    return torch.where(possible, picked, instead)
