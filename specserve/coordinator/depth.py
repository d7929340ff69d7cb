"""How many tokens to draft for a request in the next round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from specserve.coordinator.chain import Chain
from specserve.coordinator.commits import Commit
from specserve.coordinator.requests import RequestState
from specserve.coordinator.rounds import Round, lasts
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.trees import Tree
from specserve.transport.messages import Verdict
from specserve.tree_shape import TreeShape
from specserve.types import RoundStats, RowId


class Checked(NamedTuple):
    """What one decode row offered in a round, a chain of so many tokens, and how many of them the target kept.

    Of a tree: its levels, the length of the path that was kept, and what was met on it, as `Tree.met` says; `nodes`
    are all of it. tried: see `Chain.tried`.
    """

    row: RowId
    offered: int
    kept: int
    nodes: int
    met: Sequence[tuple[int, int]] | None = None
    tried: Sequence[tuple[float, bool]] = ()


def checked_of(current: Round, verdict: Verdict, commits: Sequence[Commit]) -> list[Checked]:
    """What became of the round's drafts, for the requests to which it committed something."""
    ends = {entry.state.row: (entry.chain, last) for entry, last in zip(current.rows, lasts(verdict), strict=True)}
    return [_checked(commit.state.row, *ends[commit.state.row], commit.confirmed) for commit in commits]


def _checked(row: RowId, chain: Chain, last: int, kept: int) -> Checked:
    met = chain.met(last) if isinstance(chain, Tree) else None
    return Checked(row, chain.depth, kept, len(chain.tokens), met, chain.tried(last) if chain.sureness else ())


class DepthPolicy(Protocol):
    """Decides depths for a whole batch at once. Pure planning: it has no clock and sends nothing."""

    @property
    def depth(self) -> int:
        """The deployment's depth: no request is ever given more."""
        ...

    def plan(self, states: Sequence[RequestState]) -> None:
        """These requests decode in the next round; decide for all of them."""
        ...

    def of(self, state: RequestState) -> int:
        """The depth of this request in the round that was planned; 0 is plain decoding."""
        ...

    def shape(self, state: RequestState) -> TreeShape | None:
        """The limits of its tree in that round; None where chains are drafted."""
        ...

    def guessed(self, state: RequestState) -> int:
        """The most tokens of a guess in that round, which takes no time to make: no fewer than `of` says."""
        ...

    def ahead(self, state: RequestState) -> int:
        """How long a chain to draft for the round after the next verdict; 0 for none."""
        ...

    def drafting(self, state: RequestState) -> bool:
        """Whether the draft worker is to follow this request from round to round."""
        ...

    def wanted(self, state: RequestState) -> int:
        """What the deployment or the request asks for; 0 means that drafts are never made for it."""
        ...

    def offer(self, rows: Sequence[TargetRow]) -> None:
        """The drafts of the round that was planned are there: lower the rows' depths to what is worth checking."""
        ...

    def observe(self, stats: RoundStats, checked: Sequence[Checked]) -> None:
        """The round that was planned is over."""
        ...


@dataclass(frozen=True)
class FixedDepth:
    """The deployment's depth, or the request's own, within what can still be used.

    A drafted token is worth nothing past the answer's end, so depth ≤ tokens left − 1 and ≤ context left − 1, for the
    target's context and for the draft's own. tree: the limits of every tree, where trees are drafted.
    """

    depth: int
    target_context: int
    draft_context: int | None
    tree: TreeShape | None = None

    def wanted(self, state: RequestState) -> int:
        """See `DepthPolicy`."""
        asked = state.request.depth
        return self.depth if asked is None or asked > self.depth else asked

    @cached_property
    def _context(self) -> int:
        return self.target_context if self.draft_context is None else min(self.target_context, self.draft_context)

    def of(self, state: RequestState) -> int:
        """As much as is wanted and can be used."""
        wanted, longest = self.wanted(state), min(state.longest, self._context)
        usable = longest - len(state.tokens) - 1
        return wanted if wanted <= usable else max(0, usable)

    def shape(self, state: RequestState) -> TreeShape | None:
        """The deployment's."""
        del state
        return self.tree

    def guessed(self, state: RequestState) -> int:
        """As many as of any other draft."""
        return self.of(state)

    def ahead(self, state: RequestState) -> int:
        """What is wanted; the outcome that it is drafted for may leave less."""
        return self.wanted(state)

    def drafting(self, state: RequestState) -> bool:
        """Always, where drafts are wanted at all."""
        return self.wanted(state) > 0

    def plan(self, states: Sequence[RequestState]) -> None:
        """Nothing depends on the batch."""

    def offer(self, rows: Sequence[TargetRow]) -> None:
        """All that is drafted is checked."""

    def observe(self, stats: RoundStats, checked: Sequence[Checked]) -> None:
        """Nothing is learned."""
