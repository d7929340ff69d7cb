"""A draft that goes on from the target's hidden states: what it is fed waits for a verdict's states.

A token can be fed when the state at the position before it is there, so a prompt's chunk reaches the draft one round
after the target. Drafted tokens were read with the draft's own states. Where states are missing (they were sent to a
worker that was lost, the draft's cache went to others, or another request computed them), the draft begins behind
them: a short window, which grows with the answer.

At R = 0 what is kept of a chain is fed again with the target's states. At R > 0 the chain that is checked, and the
branches behind it, stay read with the draft's own; the newest token behind a miss is read with the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specserve.coordinator.ahead import AheadDrafts
from specserve.coordinator.batches import CheckedRow, DraftRow, ints
from specserve.coordinator.branches import AheadPlan, Trunk
from specserve.coordinator.chain import NOTHING, Chain
from specserve.coordinator.hidden_rows import HiddenRows
from specserve.coordinator.requests import RequestState
from specserve.coordinator.rounds import Round
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.serial import SerialDrafts
from specserve.coordinator.sharing import shareable, siblings
from specserve.coordinator.worker_drafts import WorkerLink
from specserve.transport.messages import Plan, PlanAhead, Verdict


class _Windows:
    """Where the draft reads each request from: it needs the target's state before every token that it is fed."""

    def __init__(self, link: WorkerLink) -> None:
        self.rows = HiddenRows(most=_ROUNDS_KEPT * link.config.max_batch_tokens)
        self._link = link

    def shows(self, state: RequestState, end: int) -> int:
        """Of how many tokens up to position `end` the target's states are wanted.

        While nothing is drafted for a request, only those of a short window at the end of its prompt, and of its
        answer: the target computes less of a prompt whose states nobody reads, and a draft that begins behind a window
        keeps little less than behind a whole prompt.
        """
        policy = self._link.policy
        if not policy.wanted(state):
            return 0
        return end if policy.drafting(state) else max(0, end - len(state.request.prompt) + _WINDOW)

    def begin(self, state: RequestState) -> None:
        """Nothing comes before the first token, so it is never fed."""
        if not state.draft_cached:
            state.draft_cached = state.draft_origin = 1

    def ready(self, state: RequestState, among: Sequence[RequestState]) -> bool:
        """Whether the states that the request's next feed needs are there; may begin a new window behind a gap."""
        first = self.rows.first(state)
        if first is None:
            return False
        if first >= state.draft_cached:
            if any(self._fills(other) for other in siblings(state, among)):
                return False
            self._link.drop_cache(state)
            state.draft_cached = state.draft_origin = first + 1
        return True

    def _fills(self, other: RequestState) -> bool:
        """Whether this request is about to give the draft the prompt that a sibling waits for."""
        first, covered = self.rows.first(other), max(other.draft_cached, 1)
        short = other.draft_cached < shareable(other, self._link.blocks.block_tokens)
        return short and first is not None and first < covered and self._link.policy.drafting(other)


class _AsksForStates:
    """What both ways of drafting tell the engine about the states that they wait for."""

    _windows: _Windows

    def shows(self, state: RequestState, end: int) -> int:
        """See `WorkerSource`."""
        return self._windows.shows(state, end)

    def shown(self, current: Round, verdict: Verdict) -> None:
        """See `WorkerSource`."""
        self._windows.rows.take(current, verdict)


class HiddenDrafts(_AsksForStates, SerialDrafts):
    """R = 0."""

    def __init__(self, link: WorkerLink) -> None:
        super().__init__(link)
        self._windows = _Windows(link)

    def _message(self, number: int, rows: Sequence[DraftRow]) -> Plan:
        return replace(
            super()._message(number, rows),
            origins=ints([row.state.draft_origin for row in rows]),
            hidden=self._windows.rows.before([(row.state, row.start, row.feed) for row in rows]),
        )

    def _reach(self, row: TargetRow) -> int:
        # Of the tokens that the target is about to read only the first has a state before it.
        return min(super()._reach(row), row.start + 1)

    def _plan_row(self, row: TargetRow, budget: int, taken: set[int], among: Sequence[RequestState]) -> DraftRow | None:
        state = row.state
        self.link.share(state, among)
        self._windows.begin(state)
        if self._reach(row) > state.draft_cached and not self._windows.ready(state, among):
            self.link.put_chain(state, NOTHING)
            row.depth = 0
            return None
        return self._plan_feed(row, budget, taken, among)

    def _take(self, row: DraftRow, chain: Chain, cached: int) -> bool:
        taken = super()._take(row, replace(chain, fed=0), cached)
        self._windows.rows.covered(row.state)
        return taken

    def forget(self, state: RequestState) -> None:
        """See `SerialDrafts`."""
        super().forget(state)
        self._windows.rows.forget(state)


class HiddenAhead(_AsksForStates, AheadDrafts):
    """R > 0."""

    def __init__(self, link: WorkerLink) -> None:
        super().__init__(link)
        self._windows = _Windows(link)

    def _message(self, plan: AheadPlan) -> PlanAhead:
        committed = [(each.state, each.start, each.base - each.start) for each in plan.trunks if each.start < each.base]
        return replace(
            super()._message(plan),
            origins=ints([trunk.state.draft_origin for trunk in plan.trunks]),
            hidden=self._windows.rows.before(committed),
        )

    def _reach(self, row: CheckedRow, among: Sequence[RequestState]) -> int:
        state, text = row.state, super()._reach(row, among)
        self._windows.begin(state)
        if state.draft_cached < text and not self._windows.ready(state, among):
            return state.draft_cached
        return min(text, max(state.draft_cached, self._windows.rows.end(state) + 1))

    def _trunk(self, row: CheckedRow, budget: int, taken: set[int], among: Sequence[RequestState]) -> Trunk | None:
        trunk = super()._trunk(row, budget, taken, among)
        if trunk is None or trunk.start >= trunk.base:
            return trunk
        # A token that was read before cannot be read again where the state before it is gone.
        return trunk if self._windows.rows.has(row.state, trunk.start - 1, trunk.base - 1) else None

    def forget(self, state: RequestState) -> None:
        """See `AheadDrafts`."""
        super().forget(state)
        self._windows.rows.forget(state)


_WINDOW = 32
"""Tokens of a prompt whose states are wanted while nothing is drafted. On held-out prompts of 41 to 136 tokens the
demo's head kept 1.94 tokens per round behind so many, 1.90 behind 16, and 1.97 behind the whole prompt."""

_ROUNDS_KEPT = 4
"""States of so many rounds are kept of a request that nobody drafts for meanwhile."""
