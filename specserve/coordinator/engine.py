"""The owner of truth: requests, pools, rounds, commits, endings and failures of one pipeline.

The engine is a state machine without threads, clocks or sockets of its own: `submit`, `cancel`, `receive` and
`attach` change its state, `advance` sends what is due, `flush` hands deltas to the sink. One thread drives it.

A round: admit and plan rows → ask the draft source → (push) → send chains to the verifier → (verdict) → cut at the
ending, commit, rewind both KVs, emit deltas.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain as chained
from typing import Literal

import numpy as np

from specserve.config import Config
from specserve.coordinator.activity import Activity
from specserve.coordinator.adaptive_depth import AdaptiveDepth, DraftTiming, policy_of
from specserve.coordinator.admission import check_request
from specserve.coordinator.batches import CheckedRow, verify_message
from specserve.coordinator.beside_drafts import BesideDrafts
from specserve.coordinator.commits import Committer, Verdicts
from specserve.coordinator.depth import DepthPolicy, checked_of
from specserve.coordinator.drafts import DraftSource, Guesser, GuesserDrafts, NoDrafts
from specserve.coordinator.fairness import enqueue, has_room
from specserve.coordinator.guarded import Guarded
from specserve.coordinator.levels import check_idle, check_pools, pool_levels
from specserve.coordinator.limits import check_limits
from specserve.coordinator.lookup_worth import LookupWorth
from specserve.coordinator.outbox import Outbox, Sink
from specserve.coordinator.own_drafts import OwnDrafts, RequestGuesser
from specserve.coordinator.places import PlaceSink, PlacesTold, to_nobody
from specserve.coordinator.prefix_cache import pool_of
from specserve.coordinator.requests import MOST_LOSSES, RequestState, Stage, admitted
from specserve.coordinator.rounds import Round, checked_rows
from specserve.coordinator.scheduler import Scheduler, TargetRow
from specserve.coordinator.slot_waits import SlotWaits
from specserve.coordinator.slots import SlotPool
from specserve.coordinator.sources import source_of
from specserve.coordinator.traces import RequestTraces
from specserve.coordinator.verifier_link import VerifierLink
from specserve.coordinator.worker_drafts import WorkerLink, WorkerSource, takes_turns
from specserve.errors import (
    ConfigError,
    InvalidField,
    Overloaded,
    ProtocolError,
    SpecserveError,
    Unavailable,
    VerifierLost,
)
from specserve.metrics import EngineMetrics
from specserve.text import Tokenizer
from specserve.tracing import Tracer
from specserve.transport import Arrived, Channel, PeerLost
from specserve.transport.messages import Cannot, Failed, Message, Push, PushAhead, Verdict
from specserve.types import (
    ROLES,
    AheadStats,
    Delta,
    Failure,
    FinishReason,
    Health,
    LostBy,
    PoolLevels,
    Request,
    RequestStats,
    Role,
    RowId,
    WorkerInfo,
)

log = logging.getLogger(__name__)


class Engine:
    """One pipeline's coordinator. Not thread-safe: every call comes from the thread that drives it."""

    def __init__(
        self,
        config: Config,
        *,
        target: WorkerInfo,
        draft: WorkerInfo | None,
        verifier: Channel,
        drafter: Channel | None,
        guesser: Guesser | None,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        sink: Sink,
        life: int = 0,
        draft_life: int = 0,
        guessers: Mapping[str, RequestGuesser] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
        place_sink: PlaceSink = to_nobody,
    ) -> None:
        """guessers are the model-free speculators that a request may have for its own. tracer takes spans of requests.

        place_sink takes where an owner's requests stand, before anything is done for those that begin.

        Raises ConfigError when the workers' limits can never serve a request.
        """
        check_limits(config.engine, target, draft, pipelines_per_draft=config.cluster.pipelines_per_draft)
        if guesser is not None and config.engine.tree_shape is not None:
            raise ConfigError(f"{config.draft.speculator} drafts chains only; leave engine.tree out")
        self._config = config.engine
        self._target = target
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._sink = sink
        self._clock = clock
        self._verifier = VerifierLink(verifier, life, config.engine.rule)
        self._slots = SlotPool(config.engine.slot_count)
        self._blocks = pool_of(config.engine, target)
        vocab = target.vocab_size
        self._draft_by(NoDrafts() if guesser is None else GuesserDrafts(Guarded(guesser, vocab)))
        own = {name: Guarded(each, vocab) for name, each in (guessers or {}).items()}
        lookup = LookupWorth(config.draft.looks_up) if config.draft.looks_up in own else None
        self._own_drafts = OwnDrafts(own, config.draft.speculator, self._slots, lookup)
        self._speculating = guesser is not None
        self._expects_drafts = config.engine.depth > 0 and (draft is not None or guesser is not None)
        self._has_draft_worker = drafter is not None
        self._policy: DepthPolicy = policy_of(config.engine, DraftTiming.FREE, target.context_length, None)
        self._scheduler = Scheduler(config.engine, self._blocks, self._policy, self._preempted)
        if target.drafts:
            self._draft_beside()
        self._states: dict[str, RequestState] = {}
        self._outbox = Outbox(metrics, clock)
        self._places = PlacesTold(place_sink)
        self._committer = Committer(target, tokenizer, self._blocks, metrics, clock, self._end)
        self._next_row = 0
        self._planned: list[TargetRow] | None = None  # rows that wait for the draft
        self._draft_deadline_s = 0.0
        self._round: Round | None = None  # rows that the verifier is computing
        self._accused: list[RequestState] = []  # the verifier that is away was working on them
        self._target_process = target.process
        self._ended_in_flight: list[RequestState] = []  # while the verifier computes them: they keep their blocks
        self._grown: list[RequestState] = []  # filled a block in the last round, until it is remembered
        self._round_number = 0
        self._round_began_s = 0.0
        self._shown_levels: PoolLevels | None = None
        self._last_end_s: float | None = None  # end of the last round while there was always work
        self._draining = False
        self._dead: str | None = None
        self.activity = Activity(metrics, clock)
        self._traces = None if tracer is None else RequestTraces(tracer, self.activity, clock)
        self.activity.joined("target")
        metrics.joined("target", target)
        metrics.rules(target.rules)
        if drafter is not None and draft is not None:
            self._attach_draft(drafter, draft_life, draft)

    # ---- requests -------------------------------------------------------------------------------------------

    def submit(self, request: Request, owner: str, before: RequestStats | None = None) -> None:
        """Admit a request to the queue. Raises Overloaded, Unavailable or a RequestError; nothing is kept then.

        before is given for a request that its owner sent earlier and does not know to be here (see `Submit`): it is
        taken once, whatever the queue holds.
        """
        if before is not None and self._runs_for(owner, request.id):
            return
        try:
            self._check_request(request)
            if before is None:
                self._check_room(request)
        except SpecserveError as error:
            self._metrics.rejected(error.code)
            raise
        row = RowId(self._next_row)
        self._next_row += 1
        state = admitted(row, request, owner, self._tokenizer, self._clock())
        if before is not None:
            state.resume(before)
            self._metrics.resumed()
        if self._traces is not None:
            self._traces.admitted(state)
        self._states[request.id] = state
        enqueue(self._scheduler.waiting, self._scheduler.running, state)
        self._places.queued(state)

    def _runs_for(self, owner: str, request_id: str) -> bool:
        state = self._states.get(request_id)
        return state is not None and state.owner == owner

    def _check_request(self, request: Request) -> None:
        if self._dead is not None:
            raise Unavailable(f"{self._dead}; it is being replaced")
        if request.id in self._states:
            raise InvalidField(f"a request with id {request.id!r} is already running", param="request_id")
        check_request(request, self._config, self._target)
        self._own_drafts.check(request)

    def _check_room(self, request: Request) -> None:
        if self._draining:
            raise Unavailable("the server is draining and takes no new requests; try another replica")
        places = max(0, self._config.max_requests - len(self._scheduler.running))
        if not has_room(self._scheduler.waiting, request.client, self._config.queue_limit + places):
            raise Overloaded(f"the queue is full ({self._config.queue_limit} requests wait); try again later")

    def cancel(self, request_id: str) -> None:
        """The client is gone: end the request and release what it holds. Unknown ids are ignored."""
        state = self._states.get(request_id)
        if state is not None:
            self._metrics.cancelled(state.place)
            self._end(state, "abort")

    def cancel_owner(self, owner: str) -> None:
        """An ingress is gone: cancel everything that it brought."""
        for request_id in self.requests_of(owner):
            self.cancel(request_id)

    def requests_of(self, owner: str) -> list[str]:
        """The ids of an owner's requests that have not ended."""
        return [state.request.id for state in self._states.values() if state.owner == owner]

    def tell_places(self, owner: str) -> None:
        """Say again where all requests of this owner stand: it may have missed something."""
        self._places.tell_all(owner, [state for state in self._states.values() if state.owner == owner])

    def abandon(self, reason: str) -> None:
        """The books can no longer be trusted: tell every client, touch no pool, and serve nobody from now on."""
        self._dead = reason
        self._outbox.forget_round()
        failure = Failure(500, SpecserveError.code, reason)
        for state in self._states.values():
            stats = state.stats(self._clock())
            self._outbox.put(state.owner, Delta(state.request.id, (), finish="error", stats=stats, failure=failure))
            if self._traces is not None:
                self._traces.ended(state, "error", stats, failure)
        self._states.clear()

    def drain(self) -> None:
        """Take no new requests; those admitted go on."""
        self._draining = True

    @property
    def dead(self) -> bool:
        """It was abandoned. May be asked from any thread."""
        return self._dead is not None

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._states)

    # ---- messages -------------------------------------------------------------------------------------------

    def receive(self, item: Arrived | PeerLost) -> None:
        """Take in what a worker sent, or that it is gone. Old lives and impossible messages are dropped, counted."""
        life = self._verifier.life if item.peer == "target" else self._draft_life
        if item.life != life or self._dead is not None:
            self._metrics.dropped("old_life")
            return
        if isinstance(item, PeerLost):
            self._lose(item.peer, "lost")
            return
        try:
            if item.peer == "target":
                self._from_target(item.message)
            elif self._worker is not None:
                self._from_draft(self._worker, item.message)
        except ProtocolError:
            # A worker that breaks the protocol cannot be trusted with the round: treat it as lost, nobody waits.
            self._metrics.dropped("protocol")
            self._lose(item.peer, "protocol")

    def _from_target(self, message: Message) -> None:
        match message:
            case Verdict():
                self._count_steps("target", message)
                self._commit(message)
            case Failed():
                self._fail_rows(message)
            case Cannot():
                self._cannot(message)
            case _:
                raise ProtocolError(f"the verifier sent {type(message).__name__}")

    def _from_draft(self, drafts: WorkerSource, message: Message) -> None:
        match message:
            case Failed():
                drafts.failed(message)
                return
            case Push() | PushAhead():
                self._count_steps("draft", message)
        drafts.receive(message, self._clock())

    def _count_steps(self, role: Role, message: Verdict | Push | PushAhead) -> None:
        """Raises ProtocolError for a count below 0."""
        if not any(message.steps):
            return
        if min(message.steps) < 0:
            raise ProtocolError(f"the {role} counted {message.steps} steps")
        self._metrics.stepped(role, message.steps)

    @property
    def _draft_life(self) -> int | None:
        return None if self._worker is None else self._worker.link.life

    def _draft_by(self, drafts: DraftSource) -> None:
        """Drafts come from this source from now on. It is asked for so often what it is that this is kept, too."""
        self._drafts = drafts
        self._worker = drafts if isinstance(drafts, WorkerSource) else None  # a draft worker feeds it
        self._beside = drafts if isinstance(drafts, BesideDrafts) else None  # the verifier is it

    def _deepen_by(self, policy: DepthPolicy) -> None:
        """This policy decides from now on how deep is drafted."""
        self._policy = policy
        self._scheduler.policy = policy

    # ---- rounds ---------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Send what is due now. Call after every change, and when `deadline_s` has passed."""
        if self._dead is not None:
            return
        self._advance()
        while self._lose_broken():
            self._advance()

    def _lose_broken(self) -> bool:
        """Treat workers that hang, or whose channel refused a message, as lost. True when there was one."""
        now, worker = self._clock(), self._worker
        broken = False
        if worker is not None:
            overdue_s = worker.overdue_s
            late = overdue_s is not None and now >= overdue_s
            broken = worker.link.broken or late or now >= self._overdue_s("draft")
            if broken:
                self._lose("draft", "channel" if worker.link.broken else "hung")
        if self._verifier.broken or now >= self._overdue_s("target"):
            self._lose("target", "channel" if self._verifier.broken else "hung")
            self._verifier.broken = False
            broken = True
        return broken

    def _overdue_s(self, role: Role) -> float:
        """The clock time from which on a worker hangs that has not answered its batch; infinite without one."""
        sent_s = self.activity.sent_at(role)
        return math.inf if sent_s is None else sent_s + self._config.hang_after_s

    def _advance(self) -> None:
        if self._round is not None:
            self._places.admitted(())
            return
        if self._planned is not None:
            late = self._clock() >= self._draft_deadline_s
            waiting = self._worker is not None and self._worker.waiting
            if waiting and not late:
                return
            rows, self._planned = self._planned, None
            if waiting:
                self._metrics.dropped("draft_wait")
            if self._verify(rows):
                return
        if not self._verifier.up:
            self._places.admitted(())
            self._give_up_on_verifier()
            return
        self._plan()

    def _plan(self) -> None:
        now = self._clock()
        self._round_began_s = now if self._last_end_s is None else self._last_end_s
        self._places.admitted(self._scheduler.admit(now))
        decoding = self._scheduler.decoding()
        self._policy.plan(decoding)
        rows = self._scheduler.plan(decoding)
        self.activity.idle(not self._states)
        if not rows:
            self._last_end_s = None
            return
        alone = [row for row in rows if row.state.alone]
        if alone:
            alone[0].depth = 0
            self._verify(alone[:1])
            return
        if self._drafts.begin(self._own_drafts.begin(rows, alone=not self._speculating)):
            self._planned = rows
            self._draft_deadline_s = now + self._config.draft_wait_s
        else:
            self._verify(rows)

    def _verify(self, rows: list[TargetRow]) -> bool:
        """Send the rows that are still wanted, each with the chain that is drafted for it now. False when none is."""
        if not self._verifier.up:
            return False
        worker, beside = self._worker, self._beside
        self._policy.offer(rows)
        checked = checked_rows(
            rows,
            shows=None if worker is None or not worker.link.reads_hidden else worker.shows,
            next_depth=None if beside is None else beside.depth,
        )
        if not checked:
            return False
        self._round_number += 1
        self._verifier.open([entry.state for entry in checked])
        sent = verify_message(self._round_number, checked)
        # Before the message leaves: in one process the work is done when `send` returns.
        self.activity.sent("target", self._round_number, len(checked), len(sent.feeds) + len(sent.chains), checked)
        self._verifier.send(sent)
        slots = np.array(list(chained.from_iterable([entry.chain.slots for entry in checked])), dtype=np.int64)
        self._slots.hold(slots)  # what the round names is kept until it is over
        self._round = Round(sent, checked, slots, self._round_began_s, self._fallbacks(checked))
        self._drafts.ahead(checked, self._clock())  # only now: the target is what everybody waits for
        return True

    def _fallbacks(self, checked: list[CheckedRow]) -> Counter[str]:
        """Decode rows without a draft, by why, where there should be drafts at all."""
        if not self._expects_drafts:
            return Counter()
        late = self._worker is not None and self._worker.waiting
        missed = "no_draft" if self._speculating else "draft_down"
        missed = "draft_slow" if late else missed
        plain = [entry.state for entry in checked if entry.due and not entry.chain.tokens]
        if not plain:
            return Counter()
        return Counter(missed if self._policy.of(state) else self._unwanted(state) for state in plain)

    def _unwanted(self, state: RequestState) -> Literal["request", "load"]:
        """Why the depth is 0: the request wants no drafts or has no room for one, or the policy sees no gain."""
        adaptive = isinstance(self._policy, AdaptiveDepth)
        return "load" if adaptive and self._policy.wanted(state) and state.tokens_left > 1 else "request"

    def _close_round(self, current: Round) -> None:
        """Drop the batch's own references; release requests that ended while it was computed."""
        self._round = None
        self._slots.give_back(current.slots)
        self.activity.returned("target", {})  # unless the verdict came, and with it the times
        ended, self._ended_in_flight = self._ended_in_flight, []
        for state in ended:
            self._release_target(state)

    def _commit(self, verdict: Verdict) -> None:
        current = self._round
        if current is None or verdict.round != current.number:
            raise ProtocolError(f"verdict for round {verdict.round}, which is not in flight")
        current.check(verdict, self._target.vocab_size)
        phases = {"forward": verdict.forward_s, "sampling": verdict.sampling_s}
        if self._worker is not None:
            self._worker.shown(current, verdict)
        elif self._beside is not None:
            self._beside.take(current, verdict)
            phases["draft"] = verdict.drafted.busy_s
        self.activity.returned("target", phases)
        scores = current.scores(verdict)
        self._outbox.book()
        self._close_round(current)
        commits = self._committer.apply(current, verdict, scores)
        size = self._blocks.block_tokens
        self._grown = [entry.state for entry in current.rows if entry.state.target_cached // size > entry.start // size]
        going_on = [commit for commit in commits if commit.finish is None]
        self._drafts.committed(going_on)
        self._own_drafts.committed(going_on)
        now = self._clock()
        self._drafts.settled(now)
        if self._worker is None:
            draft_busy, ahead = 0.0, AheadStats(unprepared=len(commits))
        else:
            draft_busy, self._worker.link.busy_s = self._worker.link.busy_s, 0.0
            ahead = self._worker.foreseen(len(commits))
        verdicts = Verdicts(current, verdict, commits, now, draft_busy, ahead)
        self._outbox.put_off(verdicts)
        if self._traces is not None:
            self._traces.committed(verdicts)
        if isinstance(self._policy, AdaptiveDepth):
            rows, sent = len(commits), current.sent
            if rows == len(sent.feeds) and not len(sent.chains) and self._policy.rests(rows):
                self._policy.rest({commit.state.row for commit in commits}, now - current.began_s)
            else:
                self._policy.observe(verdicts.stats, checked_of(current, verdict, commits))
        self._last_end_s = now

    def _fail_rows(self, failure: Failed) -> None:
        """The rows at fault end in an error; the others of that batch are simply planned again.

        Where no row is named, each is tried alone and without drafts, so that the one at fault harms nobody else.
        """
        current = self._round
        if current is None or failure.batch != current.number:
            raise ProtocolError(f"failure of round {failure.batch}, which is not in flight")
        named = set(failure.rows.tolist())
        self._close_round(current)
        for entry in current.rows:
            state = entry.state
            if state.stage is not Stage.RUNNING:
                continue
            if state.row in named or (not named and state.suspect):
                self._blocks.void()  # what spoilt this row may lie in blocks that others would go on from
                self._end(state, "error", failure=Failure(500, "internal_error", failure.reason))
            elif not named:
                state.suspect = True
        self._drafts.settled(self._clock())

    def _cannot(self, message: Cannot) -> None:
        """Rows that the verifier cannot continue are fed again from what it covers; the others are planned again."""
        current = self._round
        if current is None or message.batch != current.number:
            raise ProtocolError(f"cannot for round {message.batch}, which is not in flight")
        covered = current.check_cannot(message)
        self._close_round(current)
        self._blocks.void()
        self._metrics.refilled(len(covered))
        for entry in current.rows:
            state = entry.state
            if state.row in covered and state.stage is Stage.RUNNING and state.epoch == entry.epoch:
                state.lose_target(covered[state.row])
                if any(self._blocks.count(block) > 1 for block in state.target_table):  # others read these
                    state.target_cached = 0
                    self._blocks.clear(state.target_table)
        self._drafts.settled(self._clock())

    # ---- ends -----------------------------------------------------------------------------------------------

    def _end(
        self,
        state: RequestState,
        finish: FinishReason,
        made: Delta | None = None,
        failure: Failure | None = None,
    ) -> None:
        """The one way out of every admitted request: its last delta, and back goes all that it held.

        made is what the last round added, if anything.
        """
        if state.stage is Stage.ENDED:
            return
        self._outbox.book()  # what came before comes first
        if finish != "error":
            self._blocks.remember(state.target_table, state.keys, state.target_cached)
        self._scheduler.bequeath(state)
        self._scheduler.remove(state)
        del self._states[state.request.id]
        self._drafts.forget(state)
        self._own_drafts.forget(state)
        if self._round is not None and self._round.names(state):
            self._ended_in_flight.append(state)
        else:
            self._release_target(state)
        stats = state.stats(self._clock())
        self._metrics.ended(finish, stats)
        if self._traces is not None:
            self._traces.ended(state, finish, stats, failure)
        last = Delta(state.request.id, ()) if made is None else made
        self._outbox.put(state.owner, replace(last, finish=finish, stats=stats, failure=failure))

    def _release_target(self, state: RequestState) -> None:
        self._blocks.clear(state.target_table)
        self._verifier.close(state)

    def _preempted(self, state: RequestState) -> None:
        """The scheduler took this request's place away: void its caches; its committed tokens refill it later."""
        state.epoch += 1
        self._blocks.remember(state.target_table, state.keys, state.target_cached)
        state.lose_target()
        self._release_target(state)
        self._drafts.forget(state)
        self._own_drafts.forget(state)
        self._places.queued(state)
        self._metrics.preempted()

    def drop(self, reason: str) -> None:
        """Count a message that changed nothing."""
        self._metrics.dropped(reason)

    def refuse(self, owner: str, delta: Delta) -> None:
        """Tell an owner that its request was never admitted."""
        self._outbox.put(owner, delta)

    def flush(self) -> None:
        """Hand every owner its deltas, in one go each, where somebody waits for them, and book the round.

        Called after `advance`, so that this happens while the workers compute.
        """
        booked = self._outbox.book()
        self._outbox.hand_over(self._sink)
        if self._traces is not None:
            self._traces.write()
        if self._dead is None:
            self._drafts.tidy()
            self._remember()
        if booked or self._round is None:
            self.activity.book()
            self._show_levels()

    def _remember(self) -> None:
        """Let others go on from the blocks that the last round filled."""
        if not self._grown:
            return
        grown, self._grown = self._grown, []
        worker = self._worker
        for state in grown:
            if state.stage is Stage.RUNNING:
                self._blocks.remember(state.target_table, state.keys, state.target_cached)
                if worker is not None:
                    worker.link.remember(state)

    def _count_cache(self) -> None:
        self._metrics.prefix_cache("target", self._blocks.take_stats())
        if self._worker is not None:
            self._metrics.prefix_cache("draft", self._worker.link.blocks.take_stats())

    def _show_levels(self) -> None:
        self._count_cache()
        levels = self.levels()
        if levels != self._shown_levels:
            self._metrics.levels(levels)
            self._shown_levels = levels

    # ---- workers that come and go ---------------------------------------------------------------------------

    def attach(self, role: str, channel: Channel, life: int, info: WorkerInfo) -> None:
        """A worker (re)joins with a new life; what it lacks is fed in the following rounds."""
        if role == "target":
            if self._verifier.up:
                self._lose("target", "replaced")
            check_limits(self._config, info, None)
            self._blocks.resize(info.blocks)  # how much memory was free may have changed
            self._verifier.join(channel, life)
            self._judge(died=not info.process or info.process != self._target_process)
            self._target_process = info.process
            self.activity.joined("target")
            self._metrics.joined("target", info)
        else:
            self._lose("draft", "replaced")
            self._attach_draft(channel, life, info)

    def _attach_draft(self, channel: Channel, life: int, info: WorkerInfo) -> None:
        turns = takes_turns(self._config, self._target, info)
        timing = DraftTiming.WAITED if turns else DraftTiming.AHEAD
        self._deepen_by(policy_of(self._config, timing, self._target.context_length, info.context_length))
        slot_waits = SlotWaits(self._metrics, self._clock)
        shared = (self._slots, self._policy, self._metrics, self.activity, slot_waits)
        link = WorkerLink(self._config, info, channel, life, *shared)
        self._draft_by(source_of(link, self._clock, in_turns=turns))
        self._scheduler.spare_blocks = int(info.reads_hidden)
        self._speculating = True
        self.activity.joined("draft")
        self._metrics.joined("draft", info)

    def _draft_beside(self) -> None:
        """The verifier drafts what follows its verdicts: hidden from rounds as what is drafted ahead is."""
        self._deepen_by(policy_of(self._config, DraftTiming.AHEAD, self._target.context_length, None))
        self._draft_by(BesideDrafts(self._policy, self._target.vocab_size, self._target.context_length))
        self._scheduler.lookahead = self._config.depth
        self._speculating = self._expects_drafts = True

    def _lose(self, peer: str, why: LostBy) -> None:
        if peer == "target":
            self._lose_verifier(why)
        elif self._worker is not None:
            self._count_cache()
            lost = self._worker
            self._draft_by(NoDrafts())
            lost.lose(list(self._states.values()))
            self._speculating = False
            self.activity.left("draft")
            self._metrics.lost("draft", why)

    def _lose_verifier(self, why: LostBy) -> None:
        """Its KV is void: every request waits, bounded, and is refilled from its committed tokens."""
        if not self._verifier.up:
            return
        self._verifier.lose(self._clock())
        self.activity.left("target")
        self._metrics.lost("target", why)
        if self._round is not None:
            self._accused = [entry.state for entry in self._round.rows]
            self._close_round(self._round)
            self._drafts.settled(self._clock())
        self._planned = None
        self._blocks.void()
        for state in self._states.values():
            state.lose_target()
            state.target_opened = None
            self._blocks.clear(state.target_table)

    def _judge(self, *, died: bool) -> None:
        """A verifier is there again. If the one before died, what it worked on may be why: it goes on, for a while.

        A process that was only cut off, or stopped, comes back as the same one, and that is no request's fault.
        """
        accused, self._accused = self._accused, []
        for state in accused if died else ():
            state.losses += 1
            if state.losses >= MOST_LOSSES and state.stage is not Stage.ENDED:
                reason = f"the verifier died {MOST_LOSSES} times while it worked on this"
                self._end(state, "error", failure=Failure(500, "internal_error", reason))

    def _give_up_on_verifier(self) -> None:
        since = self._verifier.lost_since_s
        if since is None or self._clock() < since + self._config.recovery_wait_s:
            return
        error = VerifierLost(f"the verifier did not come back within {self._config.recovery_wait_s:g} s")
        for state in list(self._states.values()):
            self._end(state, "error", failure=Failure.of(error))

    # ---- what others may know -------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float | None:
        """The clock time at which `advance` must be called even if nothing arrives."""
        if self._dead is not None:
            return None
        deadlines = []
        if self._planned is not None and self._round is None:
            deadlines.append(self._draft_deadline_s)
        deadlines += [due_s for role in ROLES if (due_s := self._overdue_s(role)) < math.inf]
        if self._verifier.lost_since_s is not None and self._states:
            deadlines.append(self._verifier.lost_since_s + self._config.recovery_wait_s)
        if self._worker is not None and self._worker.overdue_s is not None:
            deadlines.append(self._worker.overdue_s)
        return min(deadlines, default=None)

    @property
    def away(self) -> tuple[Role, ...]:
        """The workers that should be here and are not, for whatever reason they were given up."""
        target: tuple[Role, ...] = () if self._verifier.up else ("target",)
        lacking = self._has_draft_worker and self._worker is None
        return (*target, "draft") if lacking else target

    def levels(self) -> PoolLevels:
        """How full the pools are."""
        return pool_levels(self._scheduler, self._slots, self._blocks, self._worker, self._round)

    def health(self) -> Health:
        """What a health check should say."""
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        if self._dead is not None:
            return Health("dead", self._dead, running, waiting)
        if self._draining:
            return Health("draining", "", running, waiting)
        if not self._verifier.up:
            return Health("starting", "the verifier is being restarted", running, waiting)
        if self._expects_drafts and not self._speculating:
            return Health("degraded", "speculation is off: the draft worker is away", running, waiting)
        return Health("ok", "", running, waiting)

    def check(self) -> None:
        """Prove invariants I2 and I3 for the state between two events. Raises PoolError."""
        check_pools(self._states.values(), self._slots, self._blocks, self._worker)
        planning = self._planned is not None or (self._worker is not None and self._worker.leasing)
        if not self._states and self._round is None and not planning:
            check_idle(self.levels())
