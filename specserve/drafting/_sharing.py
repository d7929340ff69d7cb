"""One draft worker for several pipelines: each coordinator has a share of its blocks and slots, and its own rows.

A coordinator numbers what it leases from 0, as if the worker were its own. Its `Tenant` moves these numbers to where
its share lies and refuses what lies outside, so that whatever one coordinator asks for, nothing of another's is read or
written. One thread computes, in turns: a turn takes the plan of every tenant that waits for one, and computes them in
the same forwards. A tenant has one plan in a turn, however many it sends; the others wait on its own way here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import numpy as np

from specserve.drafting.worker import DraftWorker, not_understood
from specserve.errors import ProtocolError, Unavailable
from specserve.sampling.grammar import Grammars
from specserve.sampling.profiles import Profiles
from specserve.transport.messages import Array, Close, Failed, Message, Open, Plan, PlanAhead, Push

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Share:
    """The blocks and slots of the worker that one coordinator may name, as 0, 1, …"""

    blocks: range
    slots: range

    def placed(self, plan: Plan | PlanAhead) -> Plan | PlanAhead:
        """The plan in the worker's own numbers. Raises ProtocolError for what lies outside of this share."""
        slots, tables = _placed("slot", plan.slots, self.slots), _placed("block", plan.tables, self.blocks)
        if isinstance(plan, Plan):
            return replace(plan, slots=slots, tables=tables)
        copied = plan.copies >= 0
        copies = plan.copies.copy()
        copies[copied] = _placed("block", copies[copied], self.blocks)
        chain_slots = _placed("slot", plan.chain_slots, self.slots)
        named = plan.next_slots >= 0
        next_slots = plan.next_slots.copy()
        next_slots[named] = _placed("slot", next_slots[named], self.slots)
        own_blocks = _placed("block", plan.own_blocks, self.blocks)
        return replace(
            plan,
            slots=slots,
            tables=tables,
            chain_slots=chain_slots,
            next_slots=next_slots,
            own_blocks=own_blocks,
            copies=copies,
        )

    def told(self, answer: Message) -> Message:
        """An answer of the worker in the coordinator's numbers."""
        return replace(answer, slots=answer.slots - self.slots.start) if isinstance(answer, Push) else answer


def shares(blocks: int, slots: int, count: int) -> tuple[Share, ...]:
    """Equal shares of a worker's blocks and slots; a rest that cannot be divided is left unused."""
    each, slots_each = blocks // count, slots // count
    return tuple(
        Share(range(n * each, (n + 1) * each), range(n * slots_each, (n + 1) * slots_each)) for n in range(count)
    )


def _placed(what: str, numbers: Array, share: range) -> Array:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= len(share)):
        raise ProtocolError(f"a {what} that is not among the {len(share)} of this pipeline's share")
    return numbers + share.start


@dataclass(slots=True, eq=False)
class _Asked:
    """A plan in the worker's numbers, and the way for its answers; None is the end of them."""

    tenant: Tenant
    plan: Plan | PlanAhead
    answers: SimpleQueue[Message | Exception | None] = field(default_factory=SimpleQueue)


class Tenant:
    """One coordinator at a shared worker: a `transport.Worker`, whose messages come from one thread, one at a time."""

    def __init__(self, turns: Turns, share: Share, grammars: Grammars | None) -> None:
        self._turns = turns
        self._share = share
        self.profiles = Profiles(grammars)
        self.apart = False
        """Its last plan failed as a whole, perhaps with those of others: the next one is computed alone."""

    def handle(self, message: Message) -> Iterable[Message]:
        """As a draft worker of its own does. Raises what ends the worker, and Unavailable when it is closed."""
        match message:
            case Open():
                self.profiles.open(message)
                return []
            case Close():
                self.profiles.close(message)
                return []
            case Plan() | PlanAhead():
                return self._asked(message)
        return [not_understood(message)]

    def _asked(self, plan: Plan | PlanAhead) -> Iterator[Message]:
        try:
            placed = self._share.placed(plan)
        except ProtocolError as error:
            yield Failed(plan.plan, np.empty(0, dtype=np.int64), f"ProtocolError: {error.message}")
            return
        for answer in self._turns.ask(_Asked(self, placed)):
            yield self._share.told(answer)


class Turns:
    """The thread that computes for all tenants of a worker."""

    def __init__(self, worker: DraftWorker, grammars: Grammars | None = None) -> None:
        self._worker = worker
        self._grammars = grammars
        self._waiting: list[_Asked] = []
        self._changed = threading.Condition()
        self._closed = False
        self._began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="specserve-turns", daemon=True)
        self._thread.start()

    def tenant(self, share: Share) -> Tenant:
        """A coordinator that nothing is known of. Whoever had this share before must have been told to leave."""
        return Tenant(self, share, self._grammars)

    @property
    def computing_s(self) -> float:
        """How long the present turn takes by now."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def ask(self, asked: _Asked) -> Iterator[Message]:
        """Wait for the next turn; the answers to the plan, as they come. Raises as `Tenant.handle`."""
        with self._changed:
            if self._closed:
                raise Unavailable("the draft worker is closed")
            self._waiting.append(asked)
            self._changed.notify()
        while (answer := asked.answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def close(self) -> None:
        """End after the present turn. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            self._began_s = time.monotonic()
            try:
                for group in _groups(turn):
                    self._compute(group)
            except Exception as error:  # the worker is of no use any more: its tenants say no more, and are missed
                log.exception("the shared draft worker failed outside of a plan")
                for asked in turn:
                    asked.answers.put(error)
            finally:
                self._began_s = None
                for asked in turn:
                    asked.answers.put(None)

    def _next(self) -> list[_Asked] | None:
        """The plans of all tenants that wait now, at least one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            turn, self._waiting = self._waiting, []
        if not self._closed:
            return turn
        for asked in turn:
            asked.answers.put(Unavailable("the draft worker is closed"))
        return None

    def _compute(self, group: Sequence[_Asked]) -> None:
        """All plans of a group are of one kind."""
        if isinstance(group[0].plan, Plan):
            plans = [(asked.tenant.profiles, asked.plan) for asked in group if isinstance(asked.plan, Plan)]
            for asked, answer in zip(group, self._worker.plans(plans), strict=True):
                _take(asked, answer)
            return
        ahead = [(asked.tenant.profiles, asked.plan) for asked in group if isinstance(asked.plan, PlanAhead)]
        for number, answer in self._worker.plans_ahead(ahead):
            _take(group[number], answer)


def _take(asked: _Asked, answer: Message) -> None:
    asked.tenant.apart = isinstance(answer, Failed) and not len(answer.rows)
    asked.answers.put(answer)


def _groups(turn: Sequence[_Asked]) -> list[list[_Asked]]:
    """What is computed in the same forwards: plans of one kind, but for those that are computed alone."""
    together: dict[type, list[_Asked]] = {}
    for asked in turn:
        if not asked.tenant.apart:
            together.setdefault(type(asked.plan), []).append(asked)
    return [*together.values(), *([asked] for asked in turn if asked.tenant.apart)]
