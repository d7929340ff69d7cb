"""R = 0 with a draft that goes on from the target's hidden states: what it is fed waits for a verdict's states.

A token can be fed when the state at the position before it is there, so a prompt's chunk reaches the draft one round
after the target. Drafted tokens were read with the draft's own states; those that are kept are fed again with the
target's. Where states are missing (they were sent to a worker that was lost, the draft's cache went to others, or
another request computed them), the draft begins behind them: a short window, which grows with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specserve.coordinator.batches import DraftRow, ints
from specserve.coordinator.chain import NOTHING, Chain
from specserve.coordinator.hidden_rows import HiddenRows
from specserve.coordinator.requests import RequestState
from specserve.coordinator.rounds import Round
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.serial import SerialDrafts
from specserve.coordinator.sharing import shareable, siblings
from specserve.coordinator.worker_drafts import WorkerLink
from specserve.transport.messages import Plan, Verdict


class HiddenDrafts(SerialDrafts):
    """Drafts of a worker whose speculator reads hidden states."""

    def __init__(self, link: WorkerLink) -> None:
        super().__init__(link)
        self._hidden = HiddenRows(most=_ROUNDS_KEPT * link.config.max_batch_tokens)

    def shows(self, state: RequestState) -> bool:
        """See `WorkerSource`."""
        return self.link.policy.wanted(state) > 0

    def shown(self, current: Round, verdict: Verdict) -> None:
        """See `WorkerSource`."""
        self._hidden.take(current, verdict)

    def _message(self, number: int, rows: Sequence[DraftRow]) -> Plan:
        return replace(
            super()._message(number, rows),
            origins=ints([row.state.draft_origin for row in rows]),
            hidden=self._hidden.before([(row.state, row.start, row.feed) for row in rows]),
        )

    def _reach(self, row: TargetRow) -> int:
        # Of the tokens that the target is about to read only the first has a state before it.
        return min(super()._reach(row), row.start + 1)

    def _plan_row(self, row: TargetRow, budget: int, taken: set[int], among: Sequence[RequestState]) -> DraftRow | None:
        state = row.state
        self.link.share(state, among)
        if not state.draft_cached:
            state.draft_cached = state.draft_origin = 1  # nothing comes before the first token, so it is never fed
        if self._reach(row) > state.draft_cached and not self._ready(state, among):
            self.link.put_chain(state, NOTHING)
            row.depth = 0
            return None
        return self._plan_feed(row, budget, taken, among)

    def _ready(self, state: RequestState, among: Sequence[RequestState]) -> bool:
        """Whether the states that the request's next feed needs are there; may begin a new window behind a gap."""
        first = self._hidden.first(state)
        if first is None:
            return False
        if first >= state.draft_cached:
            if any(self._fills(other) for other in siblings(state, among)):
                return False
            self.link.drop_cache(state)
            state.draft_cached = state.draft_origin = first + 1
        return True

    def _fills(self, other: RequestState) -> bool:
        """Whether this request is about to give the draft the prompt that a sibling waits for."""
        first, covered = self._hidden.first(other), max(other.draft_cached, 1)
        short = other.draft_cached < shareable(other, self.link.blocks.block_tokens)
        return short and first is not None and first < covered and self.link.policy.drafting(other)

    def _take(self, row: DraftRow, chain: Chain, cached: int) -> bool:
        taken = super()._take(row, replace(chain, fed=0), cached)
        self._hidden.covered(row.state)
        return taken

    def forget(self, state: RequestState) -> None:
        """See `SerialDrafts`."""
        super().forget(state)
        self._hidden.forget(state)


_ROUNDS_KEPT = 4
"""States of so many rounds are kept of a request that nobody drafts for meanwhile."""
