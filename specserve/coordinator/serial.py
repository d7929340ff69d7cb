"""R = 0: draft, then verify. One plan at a time, answered by one push, for which the round waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.coordinator.batches import CheckedRow, DraftRow, plan_message
from specserve.coordinator.chain import NOTHING, Chain
from specserve.coordinator.commits import Commit
from specserve.coordinator.requests import RequestState, Stage
from specserve.coordinator.scheduler import TargetRow, drafted
from specserve.coordinator.trees import split, tree_of
from specserve.coordinator.worker_drafts import WorkerLink, WorkerSource, fit
from specserve.errors import ProtocolError
from specserve.transport.messages import Failed, Message, Plan, Push
from specserve.tree_shape import TreeShape


@dataclass(slots=True)
class _PlanInFlight:
    number: int
    rows: list[DraftRow]
    released: list[RequestState]  # requests that ended meanwhile: their blocks are still being written


class SerialDrafts(WorkerSource):
    """Drafts of a draft worker: one plan at a time, answered by one push."""

    def __init__(self, link: WorkerLink) -> None:
        super().__init__(link)
        self._plan: _PlanInFlight | None = None
        self._shape = link.config.tree_shape

    @property
    def waiting(self) -> bool:
        """A plan is out and not answered."""
        return self._plan is not None

    @property
    def leasing(self) -> bool:
        """The plan's slots are out on lease."""
        return self._plan is not None

    @property
    def idle(self) -> bool:
        """The worker was told nothing that it is not done with."""
        return self._plan is None

    @property
    def leased(self) -> int:
        """Slots of the plan in flight."""
        return 0 if self._plan is None else sum(len(row.slots) for row in self._plan.rows)

    @property
    def overdue_s(self) -> float | None:
        """Rounds wait for a bounded time, and the engine judges hangs."""
        return None

    def begin(self, rows: list[TargetRow]) -> bool:
        """Send one plan that feeds what the draft lacks and drafts for the due rows."""
        if self._plan is not None:  # the last plan is late: this round goes on without drafts
            for row in rows:
                _keep_draft(row)
            return False
        planned = fit(rows, self.link.config.max_batch_tokens, self._plan_followed)
        if not planned:
            return False
        number = self.link.number_plan()
        self._plan = _PlanInFlight(number, planned, [])
        self.link.open(planned)
        positions = sum(row.feed + len(row.slots) for row in planned)
        self.link.activity.sent("draft", number, len(planned), positions, planned)
        self.link.send(self._message(number, planned))
        return True

    def _message(self, number: int, rows: Sequence[DraftRow]) -> Plan:
        return plan_message(number, rows)

    def ahead(self, rows: list[CheckedRow], now_s: float) -> None:
        """Nothing is drafted before the verdict is known."""

    def settled(self, now_s: float) -> None:
        """Nothing was drafted ahead."""

    def tidy(self) -> None:
        """Nothing was put off."""

    # ---- planning

    def _reach(self, row: TargetRow) -> int:
        """How many committed tokens the draft can be fed in this round."""
        return min(row.start + row.feed, self.link.context)

    def _plan_followed(
        self, row: TargetRow, budget: int, taken: set[int], among: Sequence[RequestState]
    ) -> DraftRow | None:
        """Nothing is sent for requests that are not drafted for now: what they lack is fed when they are again."""
        return self._plan_row(row, budget, taken, among) if self.link.policy.drafting(row.state) else None

    def _plan_row(self, row: TargetRow, budget: int, taken: set[int], among: Sequence[RequestState]) -> DraftRow | None:
        self.link.share(row.state, among)
        return self._plan_feed(row, budget, taken, among)

    def _plan_feed(
        self, row: TargetRow, budget: int, taken: set[int], among: Sequence[RequestState]
    ) -> DraftRow | None:
        """A row whose request covers by now what others had for it."""
        state = row.state
        lacking = self._reach(row) - state.draft_cached
        if lacking == 0 and state.chain.tokens:  # drafted already, for a round that the verifier did not compute
            _keep_draft(row)
            return None
        self.link.put_chain(state, NOTHING)  # at R = 0 every round drafts afresh from the newest token
        feed = min(lacking, budget)
        if feed <= 0 or feed < lacking:
            row.depth = 0
        if feed <= 0:
            return None
        read = max(0, row.places - 1)  # of what is drafted
        if not self.link.make_room(state, state.draft_cached + feed + read, taken, among):
            row.depth = 0
            return None
        slots = self._lease(row)
        tree = (0, 0) if row.shape is None else (row.depth, row.shape.nodes(row.depth))
        return DraftRow(state, state.epoch, state.draft_cached, feed, slots, *tree)

    def _lease(self, row: TargetRow) -> list[int]:
        """Slots for the row's depth, which is lowered to what they are enough for."""
        free, wanted = self.link.slots.free_count, row.depth
        while row.places > free:
            row.depth -= 1
        if wanted:
            self.link.slot_waits.planned(row.state.row, lacking=row.depth == 0)
        return self.link.slots.take(row.places)

    # ---- answers

    def receive(self, message: Message, now_s: float) -> None:
        """Hand pushed chains to their requests. Raises ProtocolError for a push that answers no plan of ours."""
        if not isinstance(message, Push):
            raise ProtocolError(f"the draft worker sent {type(message).__name__}")
        push, plan = message, self._plan
        if plan is None or push.plan != plan.number:
            raise ProtocolError(f"push for plan {push.plan}, which is not in flight")
        if push.rows.tolist() != [row.state.row for row in plan.rows]:
            raise ProtocolError(f"push for plan {push.plan} names other rows than the plan")
        _check_rows(push, plan.rows)
        _check_nodes(push, self.link.vocab_size)
        self.link.dists.check(push.dists)
        chains = _chains(push, plan.rows) if self._shape is None else _trees(push, plan.rows, self._shape)
        self._plan = None
        self.link.activity.returned("draft", {"draft": push.busy_s})
        self.link.busy_s += push.busy_s
        returned: list[int] = []
        for row, chain, covered in zip(plan.rows, chains, push.covered.tolist(), strict=True):
            held = frozenset(chain.slots)
            returned += [slot for slot in row.slots if slot not in held]
            if not self._take(row, chain, covered):
                returned += chain.slots
        self.link.slots.free(returned)
        self._finish(plan)

    def _take(self, row: DraftRow, chain: Chain, cached: int) -> bool:
        """Hand a chain to its request. False when it comes too late."""
        state = row.state
        if state.stage is not Stage.RUNNING or state.epoch != row.epoch:
            self.link.metrics.dropped("stale_push", len(chain))
            return False
        state.draft_cached = cached
        if row.start + row.feed != len(state.tokens):
            self.link.metrics.dropped("late_push", len(chain))  # the request moved on without this draft
            return False
        self.link.put_chain(state, chain)
        return True

    def failed(self, failure: Failed) -> None:
        """The plan in flight raised: its rows go on without drafts and are fed afresh."""
        plan = self._plan
        if plan is None or failure.batch != plan.number:
            return
        self._plan = None
        self.link.activity.returned("draft", {})
        for row in plan.rows:
            self.link.slots.free(row.slots)
        rows = [row for row in plan.rows if row.state.stage is Stage.RUNNING and row.epoch == row.state.epoch]
        self.link.distrust([*[row.state for row in rows], *plan.released])
        self.link.metrics.dropped("failed_plan", len(plan.rows))
        self._finish(plan)

    def _finish(self, plan: _PlanInFlight) -> None:
        for state in plan.released:
            self.link.release(state)

    # ---- what the engine tells

    def committed(self, commits: Sequence[Commit]) -> None:
        """Follow the commits: drafted tokens that were kept and fed are already cached."""
        slots: list[int] = []
        blocks: list[int] = []
        for commit in commits:
            state, before = commit.state, len(commit.state.tokens) - len(commit.tokens)
            chain, state.chain = state.chain, NOTHING
            slots += chain.slots
            if state.draft_cached == before:
                # The newest token is fed once more even if it was drafted: the next draft is read off behind it.
                state.draft_cached = min(before + chain.fed_along(commit.tokens), len(state.tokens) - 1)
                if self._plan is None:
                    blocks += self.link.blocks.trim(state.draft_table, state.draft_cached)
        self.link.slots.free(slots)
        self.link.blocks.free(blocks)

    def forget(self, state: RequestState) -> None:
        """Release slots at once and blocks when nothing writes them any more."""
        if self._plan is not None and any(row.state is state for row in self._plan.rows):
            self.link.put_chain(state, NOTHING)
            self._plan.released.append(state)
        else:
            self.link.release(state)

    def lose(self, states: Sequence[RequestState]) -> None:
        """The worker is gone: everything that was leased to it, and every cache it held, is void."""
        plan, self._plan = self._plan, None
        if plan is not None:
            for row in plan.rows:
                self.link.slots.free(row.slots)
        self.link.close([*states, *([] if plan is None else plan.released)])


def _keep_draft(row: TargetRow) -> None:
    """It goes on with what is drafted already, as far as that is not more than it may have now."""
    chain = row.state.chain
    row.depth = min(row.depth, chain.depth)
    while len(chain.first(row.depth)) > drafted(row.depth, row.shape):
        row.depth -= 1


def _chains(push: Push, rows: list[DraftRow]) -> list[Chain]:
    """The chain of each row of a push that `_check_nodes` let pass. Raises ProtocolError for what is no chain."""
    _check_chains(push, rows)
    ends = np.concatenate([[0], np.cumsum(push.chain_lengths)])
    fed = np.diff(np.concatenate([[0], np.cumsum(push.fed)])[ends]).tolist()
    tokens, bounds = push.tokens.tolist(), ends.tolist()
    spans = zip(rows, bounds[:-1], bounds[1:], fed, strict=True)
    dists = push.dists if len(push.dists.rows) else None
    sure = push.sureness.tolist()
    return [
        Chain(tokens[begin:end], row.slots[: end - begin], count, dists, begin, sureness=sure[begin:end])
        for row, begin, end, count in spans
    ]


def _trees(push: Push, rows: list[DraftRow], shape: TreeShape) -> list[Chain]:
    """Likewise trees, whose families are no wider than the shape's."""
    lengths = push.chain_lengths.tolist()
    columns = [split(column, lengths) for column in (push.tokens, push.parents, push.slots, push.fed)]
    sure = split(push.sureness, lengths if len(push.sureness) else [0] * len(lengths))
    trees: list[Chain] = []
    at = 0
    for row, tokens, parents, slots, fed, told in zip(rows, *columns, sure, strict=True):
        tree = tree_of(tokens, parents, slots, [bool(each) for each in fed], told)
        if not set(slots) <= set(row.slots) or tree.depth > row.levels or len(tokens) > row.nodes:
            raise ProtocolError(f"push for plan {push.plan} has a tree beyond its lease")
        if max(Counter(parents).values(), default=0) > shape.widest:
            raise ProtocolError(f"push for plan {push.plan} has a family of more than {shape.widest} nodes")
        tree.dists, tree.row = (push.dists if len(push.dists.rows) else None), at
        at += len(tree.slots)
        trees.append(tree)
    if len(push.dists.rows) not in (0, at):
        raise ProtocolError(f"push for plan {push.plan} has {len(push.dists.rows)} dists for {at} families")
    return trees


def _check_rows(push: Push, rows: list[DraftRow]) -> None:
    if any(column.shape != (len(rows),) for column in (push.chain_lengths, push.covered)):
        raise ProtocolError(f"push for plan {push.plan} has columns of unequal length")
    if any(not 0 <= n <= row.start + row.feed for n, row in zip(push.covered.tolist(), rows, strict=True)):
        raise ProtocolError(f"push for plan {push.plan} says that more is cached than was fed")


def _check_nodes(push: Push, vocab_size: int) -> None:
    lengths = push.chain_lengths
    columns = (push.tokens, push.parents, push.slots, push.fed, push.sampled)
    total = int(lengths.sum())
    if (lengths < 0).any() or any(column.shape != (total,) for column in columns):
        raise ProtocolError(f"push for plan {push.plan} has columns of unequal length")
    if total and push.tokens.astype(np.uint64).max() >= vocab_size:  # as unsigned ones, negative numbers are too large
        raise ProtocolError(f"push for plan {push.plan} has tokens outside the vocabulary of {vocab_size}")
    if push.sureness.shape not in ((0,), (total,)) or not ((push.sureness >= 0) & (push.sureness <= 1)).all():
        raise ProtocolError(f"push for plan {push.plan} is sure of its tokens by other than a chance for each")
    if not push.sampled.all():
        raise ProtocolError(f"push for plan {push.plan} has nodes that may not be offered")


def _check_chains(push: Push, rows: list[DraftRow]) -> None:
    lengths, total = push.chain_lengths.tolist(), len(push.tokens)
    if any(length > len(row.slots) for length, row in zip(lengths, rows, strict=True)):
        raise ProtocolError(f"push for plan {push.plan} has chains longer than their leases")
    if push.dists.rows.shape[0] not in (0, total):
        raise ProtocolError(f"push for plan {push.plan} has {push.dists.rows.shape[0]} dists for {total} nodes")
    leased = [slot for length, row in zip(lengths, rows, strict=True) for slot in row.slots[:length]]
    if push.slots.tolist() != leased:
        raise ProtocolError(f"push for plan {push.plan} names slots that were not leased to it")
    places = np.arange(total) - np.repeat(np.cumsum(push.chain_lengths) - push.chain_lengths, push.chain_lengths)
    gaps = push.fed[1:] & ~push.fed[:-1] & (places[1:] > 0)
    if (push.parents != places - 1).any() or gaps.any():
        raise ProtocolError(f"push for plan {push.plan} is not made of chains, each fed from its beginning")
