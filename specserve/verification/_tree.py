"""Verification of several drafted continuations at once: a tree of nodes below the newest committed token.

Rows of dists belong to places: place 0 is the root and place n + 1 is node n; a place's target row is the target dist
of the token after it. A batch is padded with absent nodes. A walk goes through the nodes once, in order, which is
right because a parent stands before its children and siblings stand in the order in which they were drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specserve.sampling.wire import Support
from specserve.verification._draft_rows import DraftRows, draw_leftover

ABSENT = -2
"""The parent of padding."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The nodes of B trees: parents and tokens, int64 [B, N]. A parent is a node's index, -1 the root, or ABSENT."""

    parents: torch.Tensor
    tokens: torch.Tensor

    @staticmethod
    def chain(tokens: torch.Tensor, lengths: torch.Tensor) -> DraftTree:
        """The tree of width 1 of chains tokens [B, K] with lengths [B]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return DraftTree(torch.where(places < lengths[:, None], places - 1, ABSENT), tokens)


def by_place(draft: DraftRows, tree: DraftTree, vocab_size: int) -> torch.Tensor:
    """[B, N + 1, V]: the dist of each place that its first child was drawn from, 0 where it has none.

    draft holds one dist per node, siblings all the same one.
    """
    count, nodes = tree.parents.shape
    dists = torch.zeros(count, (nodes + 1) * vocab_size, dtype=draft.probs.dtype, device=draft.probs.device)
    unset = torch.ones(count, nodes + 1, dtype=torch.bool, device=draft.probs.device)
    rows = torch.arange(count, device=draft.probs.device)
    for node in range(nodes):
        places = (tree.parents[:, node] + 1).clamp(min=0)
        first = unset[rows, places] & (tree.parents[:, node] != ABSENT)
        unset[rows, places] &= ~first
        # Unused entries share an id with a possible real one, so the probabilities are added, not written.
        added = torch.where(first[:, None], draft.probs[:, node], 0)
        dists.scatter_add_(1, places[:, None] * vocab_size + draft.ids[:, node], added)
    return dists.view(count, nodes + 1, vocab_size)


def follow(choices: torch.Tensor, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor]:
    """The target-first walk: go down while the target's own choice at a place labels a child of it.

    choices int64 [B, N + 1] by place. Returns the last kept node, -1 for none, and the target's choice after it, int64
    [B] each. Lossless for any tree that was made without a look at the target's noise, or under shared noise.
    """
    at = torch.full_like(choices[:, 0], -1)
    for node, (parent, token) in enumerate(zip(tree.parents.unbind(1), tree.tokens.unbind(1), strict=True)):
        wanted = choices.gather(1, at[:, None] + 1).squeeze(1)
        at = torch.where((parent == at) & (token == wanted), node, at)
    return at, choices.gather(1, at[:, None] + 1).squeeze(1)


def judge_siblings(
    target: torch.Tensor, draft: torch.Tensor, tree: DraftTree, accept: torch.Tensor, choose: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Siblings drawn without replacement (Chen et al., "Sequoia", 2024), each tested as in `rejection`: lossless.

    target and draft [B, N + 1, V] by place: the draft row of a place is the dist that its first child was drawn from;
    the next child was drawn from what is left of that row without the first one's token, renormalised, and so on. A
    refused token leaves the target with max(target - draft, 0). Siblings past the end of the draft row are refused.

    accept float64 [B, N] by node; choose float64 [B, N + 1] by place. Returns as `follow`. On a tree of width 1 this
    says exactly what `rejection.judge` says.
    """
    walk = _Walk(target, draft)
    for node in range(tree.parents.shape[1]):
        walk.test(node, tree.parents[:, node], tree.tokens[:, node], accept[:, node])
    return walk.at, walk.choose(choose)


class _Walk:
    """Where each row of the batch stands, and what is left of both dists there.

    left [B, V] are weights of the target, of which `subtracted` are to be taken away; their sum counts as `mass` [B].
    The last subtraction is put off, because the last draw makes it as `rejection` makes it.
    """

    def __init__(self, target: torch.Tensor, draft: torch.Tensor) -> None:
        self._target, self._draft = target, draft
        self._rows = torch.arange(len(target), device=target.device)
        self._ids = torch.arange(target.shape[2], device=target.device).expand(len(target), -1)
        self.at = torch.full_like(self._rows, -1)
        self._left, self._offer = target[:, 0].clone(), draft[:, 0].clone()
        self._taken = torch.zeros_like(self._left)
        self._mass = target.new_ones(len(target))

    def test(self, node: int, parent: torch.Tensor, token: torch.Tensor, noise: torch.Tensor) -> None:
        """Offer one node to the rows that stand at its parent."""
        here = parent == self.at
        self._take_away(here)
        offered = self._offer[self._rows, token]
        # Multiplied, not divided: the target's side is not normalised after a refusal.
        kept = here & (noise * offered * self._mass < self._left[self._rows, token]) & (offered > 0)
        refused = here & ~kept & (offered > 0)
        self._taken = torch.where(refused[:, None], self._offer * self._mass[:, None], self._taken)
        self._offer = torch.where(refused[:, None], self._without(token), self._offer)
        self._descend(kept, node)

    def _take_away(self, here: torch.Tensor) -> None:
        """Subtract what a refused sibling had before, in rows that are about to test another one."""
        left = (self._left - self._taken).clamp(min=0)
        # Equal dists leave nothing over but for rounding; then the target's own row stays.
        useful = here & left.any(-1) & self._taken.any(-1)
        self._left = torch.where(useful[:, None], left, self._left)
        self._mass = torch.where(useful, self._left.sum(-1), self._mass)
        self._taken = torch.where(here[:, None], 0, self._taken)

    def _without(self, token: torch.Tensor) -> torch.Tensor:
        """The draft rows without a token, renormalised; all zero where nothing else was possible."""
        rest = self._offer.scatter(1, token[:, None], 0)
        total = rest.sum(-1, keepdim=True)
        return torch.where(total > 0, rest / total, 0)

    def _descend(self, kept: torch.Tensor, node: int) -> None:
        chosen = kept[:, None]
        self.at = torch.where(kept, node, self.at)
        self._left = torch.where(chosen, self._target[:, node + 1], self._left)
        self._offer = torch.where(chosen, self._draft[:, node + 1], self._offer)
        self._taken = torch.where(chosen, 0, self._taken)
        self._mass = torch.where(kept, 1, self._mass)

    def choose(self, noise: torch.Tensor) -> torch.Tensor:
        """The token after the last kept node, by noise [B, N + 1] of its place."""
        uniforms = noise.gather(1, self.at[:, None] + 1).squeeze(1)
        return draw_leftover(self._left.clone(), Support(self._ids, self._taken), uniforms)
