"""R = 0 with a speculator that lives beside the verifier: each verdict brings the draft of the round after it.

There is no worker, no plan and no wait. What the speculator keeps lies in the target's own blocks, so it follows them
wherever they go; each round's tables only cover a few positions more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.coordinator.batches import CheckedRow
from specserve.coordinator.chain import NOTHING, Chain
from specserve.coordinator.commits import Commit
from specserve.coordinator.depth import DepthPolicy
from specserve.coordinator.layouts import Layout
from specserve.coordinator.requests import RequestState
from specserve.coordinator.rounds import Round
from specserve.coordinator.scheduler import TargetRow
from specserve.errors import ProtocolError
from specserve.transport.messages import Dists, Verdict


class BesideDrafts:
    """A `drafts.DraftSource` whose drafts come with verdicts."""

    def __init__(self, policy: DepthPolicy, vocab_size: int, context: int) -> None:
        self._policy = policy
        self._vocab_size = vocab_size
        self._context = context
        self._came: dict[int, Chain] = {}  # with the last verdict, by row
        self._drafted: dict[int, RequestState] = {}  # requests with a chain, by row
        self._layout = Layout("dists")

    def depth(self, state: RequestState) -> int:
        """How many tokens to draft behind the request's next verdict, which adds one at least."""
        left = min(state.tokens_left, self._context - len(state.tokens)) - 2
        return max(0, min(self._policy.ahead(state), left))

    def take(self, current: Round, verdict: Verdict) -> None:
        """Keep what a verdict brought until it is committed. Raises ProtocolError for drafts that nobody asked for."""
        drafted, asked = verdict.drafted, current.sent.depths
        lengths = drafted.lengths
        if not len(asked) and not len(lengths):
            return
        if lengths.shape != asked.shape or (lengths < 0).any() or (lengths > asked).any():
            raise ProtocolError(f"verdict for round {current.number} drafted {lengths.tolist()} of {asked.tolist()}")
        total = int(lengths.sum())
        if len(drafted.tokens) != total or len(drafted.dists.rows) not in (0, total):
            raise ProtocolError(f"verdict for round {current.number} drafted tokens or dists of another number")
        if total and drafted.tokens.astype(np.uint64).max() >= self._vocab_size:
            raise ProtocolError(f"verdict for round {current.number} drafted tokens outside the vocabulary")
        self._check_layout(drafted.dists)
        dists = drafted.dists if len(drafted.dists.rows) else None
        tokens, at = drafted.tokens.tolist(), 0
        for row, length in zip(verdict.rows.tolist(), lengths.tolist(), strict=True):
            self._came[row] = Chain(tokens[at : at + length], [], 0, dists, at)
            at += length

    def _check_layout(self, dists: Dists) -> None:
        """Dists that do not go with those before end all drafts: the next verifier's go with its own only."""
        try:
            self._layout.check(dists)
        except ProtocolError:
            for state in self._drafted.values():
                state.chain = NOTHING
            self._drafted.clear()
            self._layout = Layout("dists")
            raise

    def begin(self, rows: list[TargetRow]) -> bool:
        """The drafts are there, or there are none."""
        for row in rows:
            row.depth = min(row.depth, len(row.state.chain))
        return False

    def ahead(self, rows: list[CheckedRow], now_s: float) -> None:
        """The verifier drafts when it knows its verdict."""

    def committed(self, commits: Sequence[Commit]) -> None:
        """What came with the verdict stands behind these tokens."""
        came, self._came = self._came, {}
        for commit in commits:
            commit.state.chain = came.get(commit.state.row, NOTHING)
            self._drafted[commit.state.row] = commit.state

    def settled(self, now_s: float) -> None:
        """Nothing was drafted ahead."""

    def tidy(self) -> None:
        """Nothing was put off."""

    def forget(self, state: RequestState) -> None:
        """The request ended or was preempted; its blocks are the target's."""
        state.chain = NOTHING
        self._drafted.pop(state.row, None)
