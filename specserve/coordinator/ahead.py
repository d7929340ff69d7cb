"""R > 0: the draft works while the target verifies.

When a round has gone to the verifier, one plan goes to the draft worker: for each checked chain, the likeliest
outcomes of its verification (how many tokens are kept, and which comes next), and slots and blocks for a chain beyond
each. The worker picks the next tokens itself, by rank, and pushes what it has after every step. When the verdict
comes, the branch whose path it took is the next chain as it stands, with its block table, and goes to the verifier at
once; a miss, or a draft that is late, costs a plain step and never a wait. (Outcome enumeration: SSD, Kumar et al.
2026; continuing only the whole chain: PEARL, Liu et al. 2024.)

A verdict does not end the draft's work: the worker goes on with its plan until the next one is there. What comes after
the verdict is too late to be offered, but the token behind the chain, and what else was likely in its place, are the
guesses of what follows the whole chain. So the next plan need not feed that chain's end first, and drafts one more.

A guess is only ever compared with what was committed. What is offered are tokens that were picked after it, by the
request's own rule, from a dist that did not depend on them, and that no verdict has looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specserve.coordinator.allotment import Bounds, allot
from specserve.coordinator.batches import CheckedRow
from specserve.coordinator.branches import AheadPlan, Trunk
from specserve.coordinator.chain import NOTHING
from specserve.coordinator.commits import Commit
from specserve.coordinator.costs import Curve, Mean
from specserve.coordinator.outcomes import Guess, OutcomeOdds
from specserve.coordinator.requests import RequestState, Stage
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.worker_drafts import WorkerLink, WorkerSource, fit
from specserve.errors import ProtocolError
from specserve.transport.messages import Failed, Message, PlanAhead, PushAhead
from specserve.types import AheadStats

_CATCH_UP = 32
"""Committed tokens that the draft may lack of a request that it does not draft for. They are fed in one go: the draft
is idle then, and a forward of so many tokens takes it hardly longer than one of a single token."""

_GIVE_UP_AFTER = 10
"""Times the longest wait for a draft, before a worker that does not answer counts as lost."""


class _TimeLeft(NamedTuple):
    """Seconds for a plan's steps: to be pushed before the verdict, and to be done before another plan could begin."""

    until_verdict_s: float
    until_next_plan_s: float


class _Steps(NamedTuple):
    """Forwards of a plan: those whose tokens can be offered, and all of them."""

    in_time: int
    in_all: int


class AheadDrafts(WorkerSource):
    """Drafts made beside the verifier: a plan for each round, with branches that are kept until that round is over.

    The worker may not be done with it then: it ends what it was told, and so has at most two plans.

    How many branches a request gets is configured, or chosen by measured costs.
    """

    def __init__(self, link: WorkerLink) -> None:
        super().__init__(link)
        self._outcomes = link.config.outcomes
        self._odds = OutcomeOdds(link.config.fan_out)
        self._step_cost = Curve()  # of the draft, by rows
        self._round_s = Mean()  # from sending a round to its verdict
        self._lag_s = Mean()  # what a plan takes beyond its steps, where the worker waits for it
        self._turn_s = Mean()  # from a verdict to the next round, where it follows at once
        self._plan: AheadPlan | None = None
        self._ending: AheadPlan | None = None  # the plan before, which the worker is not done with
        self._gap_s = Mean()  # between two plans, where the second one waits for the worker
        self._heard_s = 0.0  # when the worker pushed last
        self._late_s = 0.0  # what it computed of the plan before while this one waited
        self._settled_s: float | None = None
        self._due: list[CheckedRow] = []  # the round in flight, until a plan for it was sent
        self._round_began_s: float | None = None  # of the round that was told of
        self._number = 0
        self._checked: list[tuple[int, int]] = []  # tokens offered and kept, not yet learned from
        self._guesses: list[Guess] = []  # likewise
        self._foreseen = (0, 0, 0)  # rows whose outcome was drafted for, rows where others were, and all outcomes
        self.hits = 0
        self.misses = 0

    @property
    def waiting(self) -> bool:
        """The verifier never waits for a draft."""
        return False

    @property
    def leasing(self) -> bool:
        """A plan's slots and blocks are out on lease."""
        return self._plan is not None

    @property
    def idle(self) -> bool:
        """The worker was told nothing that it is not done with, and nothing is kept for its answers."""
        return self._plan is None and self._ending is None

    @property
    def leased(self) -> int:
        """Slots of the plan's branches, but for those that requests took over."""
        return 0 if self._plan is None else self._plan.slots_left

    @property
    def overdue_s(self) -> float | None:
        """The end of an answer that takes this long was lost, or the worker hangs."""
        for plan in (self._ending, self._plan):  # the first one was sent first
            if plan is not None and not plan.over:
                return plan.sent_s + _GIVE_UP_AFTER * self.link.config.draft_wait_s
        return None

    def begin(self, rows: list[TargetRow]) -> bool:
        """Offer what is drafted now."""
        for row in rows:
            row.depth = min(row.depth, len(row.state.chain.tokens))
        return False

    # ---- planning

    def ahead(self, rows: list[CheckedRow], now_s: float) -> None:
        """Draft for the outcomes of this round, now or as soon as the worker has begun what it was told before."""
        if self._settled_s is not None and now_s - self._settled_s < (self._round_s.value or 0.0):
            self._turn_s.observe(now_s - self._settled_s)
        self._settle()  # also a round that never got a verdict
        self._let_go()
        self._due, self._round_began_s = rows, now_s
        self._launch(now_s)

    def _launch(self, now_s: float) -> None:
        if self._plan is not None or not self._due:
            return
        rows, self._due = self._due, []
        # Those that still stand where they stood when the round was sent.
        current = [row for row in rows if len(row.state.tokens) == row.length and _runs(row.state, row.epoch)]
        trunks = fit(current, self.link.config.max_batch_tokens, self._trunk)
        if not trunks:
            return
        self._number = self.link.number_plan()
        time_left = self._time_left(now_s)
        due = [trunk for trunk in trunks if trunk.due]
        fed = sum([trunk.feed for trunk in trunks])
        room = max(0, self.link.config.max_batch_tokens - fed)
        count = min(self._count(due, time_left), room // max(1, len(due)))
        steps = self._steps(len(due) * (1 + count), time_left)
        bounds = Bounds(steps.in_all, self.link.context)
        # One token more than is offered: it tells what may follow the whole chain.
        wanted = [trunk.depth + 1 if trunk.due else 0 for trunk in trunks]
        branches = allot(trunks, wanted, self._odds, count, bounds, self.link.slots, self.link.blocks)
        self._late_s = 0.0
        plan = self._plan = AheadPlan(self._number, trunks, branches, now_s, self.link.slots, self.link.blocks)
        self._note_slot_waits(plan)
        self.link.open(trunks)
        for trunk in trunks:
            trunk.text_start = min(trunk.state.draft_known, trunk.start)
            trunk.state.draft_known = trunk.base
        positions = fed + plan.slots_left
        self.link.activity.sent("draft", self._number, len(trunks) + len(branches), positions, trunks)
        self.link.send(self._message(plan))

    def _message(self, plan: AheadPlan) -> PlanAhead:
        return plan.message()

    def _note_slot_waits(self, plan: AheadPlan) -> None:
        """Requests that could have had a branch, had there been a slot left, wait for one."""
        none_left = self.link.slots.free_count == 0
        if not none_left and not self.link.slot_waits.any:
            return
        for trunk, branches in zip(plan.trunks, plan.branch_counts, strict=True):
            if trunk.due:
                self.link.slot_waits.planned(trunk.state.row, lacking=none_left and not branches)

    def _follows(self, state: RequestState) -> bool:
        """Whether the draft is to be fed now."""
        if self.link.policy.drafting(state):
            return True
        return self.link.policy.wanted(state) > 0 and len(state.tokens) - state.draft_cached > _CATCH_UP

    def _trunk(self, row: CheckedRow, budget: int, taken: set[int], among: Sequence[RequestState]) -> Trunk | None:
        state, link = row.state, self.link
        depth = link.policy.ahead(state) if row.due else 0
        if not depth and not self._follows(state):
            return None
        if not state.draft_table:
            link.share(state, among)
        text = self._reach(row, among)
        if text != row.start + row.feed:
            depth = 0
        chain = row.chain if depth and row.chain.slots else NOTHING
        end = text + len(chain.tokens)
        due = depth > 0 and end <= link.context
        start = state.draft_cached
        if due and start >= end:  # the last token is read again, to look behind it
            start = max(end - 1, state.draft_origin)
        feed = min(end, link.context, start + budget) - start
        if feed <= 0:
            return None
        covered = len(state.draft_table) * link.blocks.block_tokens
        if start + feed > covered and not link.make_room(state, start + feed, taken, among):
            return None
        if not due or start + feed < end:
            return Trunk(state, row.epoch, min(text, start + feed), start, feed, NOTHING, False)
        behind = chain.next_slot if state.draft_cached >= end - 1 else None
        return Trunk(state, row.epoch, text, start, feed, chain, True, depth, behind)

    def _reach(self, row: CheckedRow, among: Sequence[RequestState]) -> int:
        """How many committed tokens the draft covers, or can be fed now."""
        del among
        return row.start + row.feed

    def _time_left(self, now_s: float) -> _TimeLeft | None:
        """What the worker has for the plan; None when nothing is known yet."""
        if self._round_s.value is None:
            return None
        lag_s = self._lag_s.value or 0.0
        verdict_s = (now_s if self._round_began_s is None else self._round_began_s) + self._round_s.value
        next_s = verdict_s + (self._turn_s.value or 0.0) + lag_s
        begins_s = now_s + lag_s
        if self._ending is not None:
            begins_s = max(begins_s, self._heard_s + self._rest_s(self._ending) + (self._gap_s.value or 0.0))
        return _TimeLeft(verdict_s - begins_s, next_s - begins_s)

    def _rest_s(self, plan: AheadPlan) -> float:
        """What the worker needs for the steps of a plan that it did not push yet."""
        return sum(self._step_cost.at(max(1, plan.rows(step))) or 0.0 for step in range(plan.pushed, plan.steps))

    def _steps(self, rows: int, left: _TimeLeft | None) -> _Steps:
        """Forwards of so many rows that there is time for."""
        deepest = self.link.policy.depth + 2
        cost_s = self._step_cost.at(max(1, rows))
        if left is None or cost_s is None:
            return _Steps(deepest, deepest)
        return _fitting(left, cost_s, deepest)

    def _count(self, due: Sequence[Trunk], left: _TimeLeft | None) -> int:
        """Outcomes per request: as configured, or what is expected to pay most at measured costs."""
        if not due:
            return 0
        outcomes = self._odds.likeliest(max(len(trunk.chain.tokens) for trunk in due))
        if self._outcomes != "auto":
            return min(self._outcomes, len(outcomes))
        best, best_gain, hit = 1, 0.0, 0.0
        unknown = not all(trunk.known for trunk in due)
        for count, probability in enumerate(outcomes.probabilities, 1):
            hit += probability
            steps = self._steps(len(due) * (1 + count), left)
            depth = min(steps.in_time - unknown, self.link.policy.depth)
            gain = hit * (1 + self._odds.expected_kept(depth))
            if gain > best_gain * 1.001:
                best, best_gain = count, gain
        return best

    def promised_in_turns(self, rows: int) -> float | None:
        """Tokens per request and second to expect if rounds waited for their drafts; None when too little is known.

        By a draft that nobody else keeps waiting: it may be only what is drafted ahead that keeps everybody waiting.
        """
        step_s, depth = self._step_cost.at(max(1, rows)), self.link.policy.depth
        if step_s is None or self._round_s.value is None:
            return None
        seconds = self._round_s.value + (self._turn_s.value or 0.0) + depth * step_s
        return (1 + self._odds.expected_kept(depth)) / seconds

    # ---- answers

    def receive(self, message: Message, now_s: float) -> None:
        """Take pushed nodes in. What answers an earlier plan, or the same twice, is dropped and counted."""
        if not isinstance(message, PushAhead):
            raise ProtocolError(f"the draft worker sent {type(message).__name__}")
        if message.plan > self._number:
            raise ProtocolError(f"push for plan {message.plan}, which was never sent")
        self.link.dists.check(message.dists)
        plan = self._under_way(message.plan)
        if plan is None or not plan.take(message, self.link.vocab_size):
            self.link.metrics.dropped("stale_push", len(message.tokens))
            return
        self.link.busy_s += message.busy_s
        if message.step == 0:
            self._learn_delays(plan, now_s - message.busy_s)
            self._fed(plan)
        else:
            self._step_cost.observe(max(1, plan.rows(message.step)), message.busy_s)
        self._heard_s = now_s
        plan.over |= message.last
        if plan is self._ending:
            self._late_s += message.busy_s
            self._ending = None if plan.over else plan
        else:
            self._ending = None  # it does what it is told in order, also where the end of that was lost
            if plan.over:
                self._answered(plan)
        self._let_go()
        self._launch(now_s)

    def _under_way(self, number: int) -> AheadPlan | None:
        """The plan of this number, unless the worker is done with it."""
        for plan in (self._plan, self._ending):
            if plan is not None and plan.number == number and not plan.over:
                return plan
        return None

    def _learn_delays(self, plan: AheadPlan, begun_s: float) -> None:
        """A first push came, of a step that began at this time if pushes took no time."""
        if plan.sent_s < self._heard_s:  # it had to wait for the one before
            self._gap_s.observe(max(0.0, begun_s - self._heard_s))
        else:
            self._lag_s.observe(max(0.0, begun_s - plan.sent_s))

    def _fed(self, plan: AheadPlan) -> None:
        """The trunks are cached; for a request that has moved on meanwhile, only what is committed counts."""
        for trunk in plan.trunks:
            state = trunk.state
            if not trunk.gone and state.epoch == trunk.epoch and (not trunk.due or len(state.tokens) == trunk.base):
                state.draft_cached = trunk.start + trunk.feed

    def _answered(self, plan: AheadPlan) -> None:
        """Book what the worker computed since the plan was sent, the end of the one before included."""
        self.link.activity.returned("draft", {"draft": plan.busy_s + self._late_s})

    def failed(self, failure: Failed) -> None:
        """The plan raised: its requests go on without drafts and are fed afresh."""
        plan = self._under_way(failure.batch)
        if plan is None:
            return
        states = [each.state for each in plan.trunks if _runs(each.state, each.epoch)]
        for state in states:
            self.link.put_chain(state, NOTHING)
            if self._plan is not None:
                self._plan.leave(state)  # what it drafts goes on from what nobody knows
        self.link.distrust(states)
        self.link.metrics.dropped("failed_plan", len(plan.trunks))
        plan.over = True
        if plan is self._ending:
            self._ending = None
        else:
            self.link.activity.returned("draft", {})
            plan.settled = True
        self._let_go()

    # ---- what the engine tells

    def committed(self, commits: Sequence[Commit]) -> None:
        """Take over the branches that came true; without one the draft goes on from the committed tokens."""
        slots: list[int] = []
        outcomes: list[tuple[int, int, int]] = []  # trunk, tokens kept, next token
        plan, checked = self._plan, self._checked
        for commit in commits:
            state, tokens = commit.state, commit.tokens
            chain, length, kept = state.chain, len(state.tokens), len(tokens) - 1
            if chain is not NOTHING:
                slots += chain.held
                state.chain = NOTHING
            if commit.source is None:  # what others guessed says nothing of this draft
                checked.append((commit.offered, kept))
            if state.draft_cached >= length:
                state.draft_cached = length - 1
            trunk = None if plan is None else plan.trunk_of(state, length - kept - 1)
            if trunk is not None:
                outcomes.append((trunk, kept, tokens[-1]))
        self.link.slots.free(slots)
        if plan is not None and outcomes:
            self._adopt(plan, outcomes)

    def _adopt(self, plan: AheadPlan, outcomes: Sequence[tuple[int, int, int]]) -> None:
        true, guesses = plan.find(outcomes)
        self._guesses += guesses
        self._foreseen = len(true), len(outcomes) - len(true), len(plan.branches)
        self.hits += len(true)
        self.misses += len(outcomes) - len(true)
        if true:
            plan.adopt(true)

    def foreseen(self, due: int) -> AheadStats:
        """See `WorkerSource`."""
        (hits, misses, outcomes), self._foreseen = self._foreseen, (0, 0, 0)
        return AheadStats(hits, misses, max(0, due - hits - misses), outcomes)

    def settled(self, now_s: float) -> None:
        """The round is over: branches that did not come true are dead, and released when there is time."""
        self._settled_s = now_s
        if self._round_began_s is not None:
            self._round_s.observe(now_s - self._round_began_s)
        self._round_began_s = None
        self._settle()

    def _settle(self) -> None:
        self._due = []
        if self._plan is not None:
            self._plan.settled = True

    def tidy(self) -> None:
        """Learn from the last round, and release what is left of its plan."""
        self._learn()
        self._let_go()

    def _let_go(self) -> None:
        """Release what is left of a plan whose round is over, also where the worker still writes to it.

        It does what it is told in order, so whoever is given a slot or a block next writes later. But what a plan feeds
        must be known before the next one can be made.
        """
        plan = self._plan
        if plan is None or not plan.settled:
            return
        if not plan.over:
            if self._ending is not None or not plan.pushed:
                return
            self._ending = plan
            self._answered(plan)
        plan.release()
        self._plan = None

    def _learn(self) -> None:
        if self._checked:
            self._odds.observe_chains(self._checked)
            self._odds.observe_guesses(self._guesses)
            self._odds.renew([offered for offered, _ in self._checked])  # now: the next plan is in a hurry
            self._checked, self._guesses = [], []

    def forget(self, state: RequestState) -> None:
        """Release what the request holds; what is left of its branches goes with their plan.

        Its blocks may go although the worker may still write to them: it does what it is told in order, so whoever is
        given them next writes later.
        """
        if self._plan is not None:
            self._plan.leave(state)
        self.link.release(state)

    def lose(self, states: Sequence[RequestState]) -> None:
        """The worker is gone: everything that was leased to it, and every cache it held, is void."""
        plan, self._plan, self._ending = self._plan, None, None
        self._due = []
        if plan is not None:
            plan.release()
        self.link.close(states)


def _fitting(left: _TimeLeft, cost_s: float, deepest: int) -> _Steps:
    """At least two in time, which make one token everywhere, and one more where it delays nothing."""
    in_time = max(2, min(deepest, int(left.until_verdict_s / cost_s)))
    one_more = in_time < deepest and (in_time + 1) * cost_s <= left.until_next_plan_s
    return _Steps(in_time, in_time + one_more)


def _runs(state: RequestState, epoch: int) -> bool:
    """The request is still in the incarnation of that epoch."""
    return state.stage is Stage.RUNNING and state.epoch == epoch
