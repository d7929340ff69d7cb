"""Where drafts come from, as the engine sees it: a draft worker, a model-free guesser, or nowhere.

Each source is asked once per round (`begin`), may need waiting for, and is told what was committed and forgotten.
Drafts land in the requests' tries; the engine reads chains from there and knows nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specserve.config import EngineConfig
from specserve.coordinator.activity import Activity
from specserve.coordinator.batches import DraftRow, open_message, plan_message
from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.depth import FixedDepth
from specserve.coordinator.requests import RequestState, Stage
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.sharing import shareable, siblings
from specserve.coordinator.slots import SlotPool
from specserve.coordinator.trie import NO_SLOT, ROOT, Nodes
from specserve.errors import ChannelError, ProtocolError
from specserve.metrics import EngineMetrics
from specserve.transport import Channel
from specserve.transport.messages import Close, Failed, Message, Push
from specserve.types import WorkerInfo


class Guesser(Protocol):
    """A model-free speculator: it lives beside the coordinator and costs no round trip."""

    def open(self, row: int, tokens: Sequence[int]) -> None:
        """Learn a request's committed tokens; replaces what was known of it."""
        ...

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Append newly committed tokens."""
        ...

    def guess(self, row: int, depth: int) -> list[int]:
        """At most `depth` tokens that may follow; empty when there is no idea."""
        ...

    def close(self, row: int) -> None:
        """Forget a request."""
        ...


class DraftSource(Protocol):
    """One source of drafts for all requests."""

    def begin(self, rows: list[TargetRow]) -> bool:
        """Start drafting for the due rows, whose depth may be lowered. True when there is something to wait for."""
        ...

    def committed(self, state: RequestState, tokens: Sequence[int]) -> None:
        """These tokens were just appended to the request."""
        ...

    def forget(self, state: RequestState) -> None:
        """The request ended or was preempted: release all that is held for it."""
        ...


class NoDrafts:
    """Plain decoding."""

    def begin(self, rows: list[TargetRow]) -> bool:
        """Every row decodes plainly."""
        for row in rows:
            row.depth = 0
        return False

    def committed(self, state: RequestState, tokens: Sequence[int]) -> None:
        """Whatever a lost worker had drafted still in the trie follows the commit."""
        state.trie.advance(tokens)

    def forget(self, state: RequestState) -> None:
        """Drop what a lost worker may have left."""
        state.trie.clear()


class GuesserDrafts:
    """Drafts of a model-free speculator, asked at the moment they are needed."""

    def __init__(self, guesser: Guesser) -> None:
        self._guesser = guesser
        self._known: set[int] = set()

    def begin(self, rows: list[TargetRow]) -> bool:
        """Put each due row's guess into its trie."""
        for row in rows:
            if row.depth > 0:
                self._guess(row)
        return False

    def _guess(self, row: TargetRow) -> None:
        state = row.state
        if state.row not in self._known:
            self._guesser.open(state.row, state.tokens)
            self._known.add(state.row)
        tokens = self._guesser.guess(state.row, row.depth)[: row.depth]
        state.trie.clear()
        if tokens:
            n = len(tokens)
            state.trie.append(
                Nodes(tokens, list(range(ROOT, n - 1)), [NO_SLOT] * n, fed=[False] * n, sampled=[True] * n)
            )

    def committed(self, state: RequestState, tokens: Sequence[int]) -> None:
        """Guesses look at all committed tokens."""
        state.trie.clear()
        if state.row in self._known:
            self._guesser.extend(state.row, tokens)

    def forget(self, state: RequestState) -> None:
        """Close the row; a preempted request is opened anew."""
        state.trie.clear()
        if state.row in self._known:
            self._known.discard(state.row)
            self._guesser.close(state.row)


@dataclass(slots=True)
class _PlanInFlight:
    number: int
    rows: list[DraftRow]
    released: list[RequestState]  # requests that ended meanwhile: their blocks are still being written


class WorkerDrafts:
    """Drafts of a draft worker: one plan at a time, answered by one push."""

    def __init__(
        self,
        config: EngineConfig,
        info: WorkerInfo,
        channel: Channel,
        life: int,
        slots: SlotPool,
        policy: FixedDepth,
        metrics: EngineMetrics,
        activity: Activity,
    ) -> None:
        self.life = life
        self.slots = slots
        self.blocks = BlockPool(info.blocks, info.block_tokens)
        self.busy_s = 0.0
        self.broken = False  # the channel refused a message: the engine treats the worker as lost
        self._config = config
        self._context = info.context_length
        self._channel = channel
        self._policy = policy
        self._metrics = metrics
        self._activity = activity
        self._plan: _PlanInFlight | None = None
        self._number = 0

    @property
    def waiting(self) -> bool:
        """A plan is out and not answered."""
        return self._plan is not None

    @property
    def leased(self) -> int:
        """Slots that the plan in flight may fill."""
        return 0 if self._plan is None else sum(len(row.slots) for row in self._plan.rows)

    def begin(self, rows: list[TargetRow]) -> bool:
        """Send one plan that feeds what the draft lacks and drafts for the due rows."""
        self.busy_s = 0.0
        if self._plan is not None:  # the last plan is late: this round goes on without drafts
            for row in rows:
                row.depth = min(row.depth, len(row.state.trie))
            return False
        planned = self._plan_rows(rows)
        if not planned:
            return False
        self._number += 1
        self._plan = _PlanInFlight(self._number, planned, [])
        for draft in planned:
            if draft.state.draft_opened != (self.life, draft.epoch):
                draft.state.draft_opened = (self.life, draft.epoch)
                self._send(open_message(draft.state, self._config.rule))
        self._activity.sent("draft", self._number, len(planned), sum(row.feed + len(row.slots) for row in planned))
        self._send(plan_message(self._number, planned))
        return True

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ChannelError:
            self.broken = True

    # ---- planning

    def _plan_rows(self, rows: list[TargetRow]) -> list[DraftRow]:
        """Most promising requests first; when KV runs short the least promising lose theirs and run at depth 0."""
        planned: list[DraftRow] = []
        taken: set[int] = set()
        budget = self._config.max_batch_tokens
        for row in sorted(rows, key=lambda row: -_promise(row.state)):
            if not self._policy.wanted(row.state):
                continue
            draft = self._plan_row(row, budget, taken, rows)
            if draft is not None:
                planned.append(draft)
                taken.add(row.state.row)
                budget -= draft.feed
        return planned

    def _plan_row(self, row: TargetRow, budget: int, taken: set[int], rows: list[TargetRow]) -> DraftRow | None:
        state = row.state
        self._share(state, rows)
        end = min(row.start + row.feed, self._context)
        lacking = end - state.draft_cached
        if lacking == 0 and len(state.trie):  # drafted already, for a round that the verifier did not compute
            row.depth = min(row.depth, len(state.trie))
            return None
        state.trie.clear()  # at R = 0 every round drafts afresh from the newest token
        feed = min(lacking, budget)
        if feed <= 0 or feed < lacking:
            row.depth = 0
        if feed <= 0:
            return None
        if not self._make_room(state, state.draft_cached + feed + max(0, row.depth - 1), taken, rows):
            row.depth = 0
            return None
        slots = self.slots.take(row.depth)
        row.depth = len(slots)
        return DraftRow(state, state.epoch, state.draft_cached, feed, slots)

    def _share(self, state: RequestState, rows: list[TargetRow]) -> None:
        """Take over what a sibling has of the prompt."""
        positions = 0 if state.draft_table else shareable(state, self.blocks.block_tokens)
        if not positions:
            return
        filled = [each for each in siblings(state, (row.state for row in rows)) if each.draft_cached >= positions]
        if filled:
            state.draft_table = self.blocks.fork(filled[0].draft_table, positions)
            state.draft_cached = positions

    def _make_room(self, state: RequestState, positions: int, taken: set[int], rows: list[TargetRow]) -> bool:
        while not self.blocks.cover(state.draft_table, positions):
            victims = [
                row.state
                for row in rows
                if row.state.draft_table and row.state is not state and row.state.row not in taken
            ]
            if not victims:
                return False
            self._drop_cache(min(victims, key=_promise))
        return True

    def _drop_cache(self, state: RequestState) -> None:
        self.blocks.clear(state.draft_table)
        state.draft_cached = 0

    # ---- answers

    def receive(self, push: Push) -> None:
        """Put pushed nodes into the tries. Raises ProtocolError for a push that answers no plan of ours."""
        plan = self._plan
        if plan is None or push.plan != plan.number:
            raise ProtocolError(f"push for plan {push.plan}, which is not in flight")
        if push.rows.tolist() != [row.state.row for row in plan.rows]:
            raise ProtocolError(f"push for plan {push.plan} names other rows than the plan")
        _check_chains(push, plan.rows)
        self._plan = None
        self._activity.returned("draft", {"draft": push.busy_s})
        self.busy_s += push.busy_s
        offset = 0
        for index, row in enumerate(plan.rows):
            count = int(push.chain_lengths[index])
            self._take(push, row, index, offset, count)
            offset += count
        self._finish(plan)

    def _take(self, push: Push, row: DraftRow, index: int, offset: int, count: int) -> None:
        state = row.state
        self.slots.free(row.slots[count:])
        if state.stage is not Stage.RUNNING or state.epoch != row.epoch:
            self.slots.free(row.slots[:count])
            self._metrics.dropped("stale_push", count)
            return
        state.draft_cached = int(push.covered[index])
        if row.start + row.feed != len(state.tokens):
            self.slots.free(row.slots[:count])  # the request moved on without this draft
            self._metrics.dropped("late_push", count)
            return
        span = slice(offset, offset + count)
        has_dists = push.dists.rows.shape[0] > 0
        state.trie.append(
            Nodes(
                push.tokens[span].tolist(),
                push.parents[span].tolist(),
                row.slots[:count],
                push.fed[span].tolist(),
                push.sampled[span].tolist(),
                push.dists if has_dists else None,
                offset,
            )
        )

    def failed(self, failure: Failed) -> None:
        """The plan in flight raised: its rows go on without drafts and are fed afresh."""
        plan = self._plan
        if plan is None or failure.batch != plan.number:
            return
        self._plan = None
        self._activity.returned("draft", {})
        for row in plan.rows:
            self.slots.free(row.slots)
            if row.state.stage is Stage.RUNNING and row.epoch == row.state.epoch:
                self._drop_cache(row.state)
        self._metrics.dropped("failed_plan", len(plan.rows))
        self._finish(plan)

    def _finish(self, plan: _PlanInFlight) -> None:
        for state in plan.released:
            self._release(state)

    # ---- what the engine tells

    def committed(self, state: RequestState, tokens: Sequence[int]) -> None:
        """Follow the commit: drafted tokens that were kept and fed are already cached."""
        before = len(state.tokens) - len(tokens)
        current = state.draft_cached == before
        fed = state.trie.advance(tokens)
        state.trie.clear()  # at R = 0 what would survive is not kept: its KV past the commit goes with the rewind
        if current:
            # The newest token is fed once more even if it was drafted: the next draft is read off behind it.
            state.draft_cached = min(state.draft_cached + fed, len(state.tokens) - 1)
            if self._plan is None:
                self.blocks.rewind(state.draft_table, state.draft_cached)

    def forget(self, state: RequestState) -> None:
        """Release slots at once and blocks when nothing writes them any more."""
        state.trie.clear()
        if self._plan is not None and any(row.state is state for row in self._plan.rows):
            self._plan.released.append(state)
        else:
            self._release(state)

    def _release(self, state: RequestState) -> None:
        self._drop_cache(state)
        if state.draft_opened is not None and state.draft_opened[0] == self.life:
            state.draft_opened = None
            self._send(Close(state.row))

    def lose(self, states: Sequence[RequestState]) -> None:
        """The worker is gone: everything that was leased to it, and every cache it held, is void."""
        plan, self._plan = self._plan, None
        if plan is not None:
            for row in plan.rows:
                self.slots.free(row.slots)
        released = [] if plan is None else plan.released
        for state in [*states, *released]:
            state.trie.clear()
            state.draft_opened = None
            self._drop_cache(state)
        self._channel.close()


def _promise(state: RequestState) -> float:
    """Share of drafts that the target kept so far, with a prior of one half."""
    return (state.kept + 1) / (state.drafted + 2)


def _check_chains(push: Push, rows: list[DraftRow]) -> None:
    lengths = push.chain_lengths.tolist()
    total = sum(lengths)
    if any(not 0 <= length <= len(row.slots) for length, row in zip(lengths, rows, strict=True)):
        raise ProtocolError(f"push for plan {push.plan} has chains longer than their leases")
    columns = (push.tokens, push.parents, push.slots, push.fed, push.sampled)
    if any(column.shape != (total,) for column in columns):
        raise ProtocolError(f"push for plan {push.plan} has columns of unequal length")
    if push.dists.rows.shape[0] not in (0, total):
        raise ProtocolError(f"push for plan {push.plan} has {push.dists.rows.shape[0]} dists for {total} nodes")
    leased = [slot for length, row in zip(lengths, rows, strict=True) for slot in row.slots[:length]]
    if push.slots.tolist() != leased:
        raise ProtocolError(f"push for plan {push.plan} names slots that were not leased to it")
