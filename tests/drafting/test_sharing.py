"""One draft worker for several coordinators: shares, turns, and what one of them can do to the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_backend import TableBackend
from worker_messages import Part, ints, opened, plan

from specserve.drafting._sharing import Share, Tenant, Turns, shares
from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import SparseDists, Workspace
from specserve.errors import GroupLost, ProtocolError, Unavailable
from specserve.transport.messages import Cancel, Failed, Message, Plan, PlanAhead, Push, PushAhead

VOCAB = 9
CPU = torch.device("cpu")
PATIENCE_S = 20.0


class Gate(SmallModel):
    """Waits in a forward while it is shut, notes how many rows it is given, and fails for a token of its choice."""

    def __init__(self, backend: TableBackend) -> None:
        super().__init__(backend, VOCAB)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.sizes: list[int] = []
        self.poison: int | None = None
        self.late_poison: int | None = None
        self.lost = False

    def _begin(self, feeds: list[list[int]]) -> None:
        self.sizes.append(len(feeds))
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        if self.lost:
            raise GroupLost("a rank is gone")
        if any(self.poison in feed for feed in feeds):
            raise ValueError("poison")

    def propose(self, jobs, workspace):
        self._begin([job.feed.tolist() for job in jobs])
        return super().propose(jobs, workspace)

    def explore(self, trunks, branches, workspace):
        feeds = [trunk.feed.tolist() for trunk in trunks]
        self._begin(feeds)
        for step, grown in enumerate(super().explore(trunks, branches, workspace)):
            yield grown
            if step == 0 and any(self.late_poison in feed for feed in feeds):
                raise ValueError("late poison")


class Shared:
    """A worker of 64 blocks and 32 slots that two coordinators share with a third, which only keeps it busy."""

    def __init__(self) -> None:
        self.model, self.worker = made()
        self.turns = Turns(self.worker)
        *self.tenants, self.third = [self.turns.tenant(share) for share in shares(64, 32, 3)]
        self.third.handle(opened(1))

    @property
    def gate(self) -> Gate:
        return self.worker._speculator  # type: ignore[return-value]


def made() -> tuple[TableBackend, DraftWorker]:
    model = TableBackend(torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2)
    model.allocate(64, 4)
    space = Workspace(32, SparseDists(32, 64, CPU), CPU, ranks=4)
    return model, DraftWorker(Gate(model), space, vocab_size=VOCAB, block_tokens=4)


@pytest.fixture
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.gate.open.set()
    shared.turns.close()


class Asking(threading.Thread):
    """What a session's receive thread does with one message."""

    def __init__(self, tenant: Tenant, message: Message) -> None:
        super().__init__(daemon=True)
        self.tenant, self.message = tenant, message
        self.answers: list[Message] = []
        self.start()

    def run(self) -> None:
        self.answers += self.tenant.handle(self.message)

    def ended(self) -> list[Message]:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.answers


def together(shared: Shared, *messages: Message) -> list[list[Message]]:
    """The answers to one message of each tenant, which come while the worker is busy with a plan of the third."""
    shared.gate.open.clear()
    shared.gate.entered.clear()
    first = Asking(shared.third, a_plan([1], number=99))
    assert shared.gate.entered.wait(PATIENCE_S)
    asking = [Asking(tenant, message) for tenant, message in zip(shared.tenants, messages, strict=True)]
    while len(shared.turns._waiting) < len(messages):
        time.sleep(0.005)
    shared.gate.open.set()
    first.ended()
    return [each.ended() for each in asking]


def a_plan(feed: list[int], *, number: int = 1, row: int = 1) -> Plan:
    return plan([Part(row, 0, feed, [0, 1], slots=[0, 1, 2])], number=number)


def an_ahead_plan(text: list[int], depth: int, number: int = 1) -> PlanAhead:
    """A trunk of two tokens, and one branch after all of it."""
    one = {"epochs": 0, "bases": 2, "text_starts": 0, "text_lengths": 2, "starts": 0, "chain_lengths": 0}
    one |= {"table_lengths": 1, "tables": 0, "branch_counts": 1, "parents": 0, "ranks": 0, "firsts": 1}
    one |= {"depths": depth, "own_lengths": 2, "copies": 0}
    return PlanAhead(
        plan=number,
        rows=np.array([1]),
        **{name: ints([value]) for name, value in one.items()},
        texts=ints(text),
        chain_slots=ints([]),
        next_slots=ints([-1]),
        next_plans=np.array([0]),
        slots=ints(range(4, 4 + depth)),
        own_blocks=ints([2, 3]),
    )


def open_rows(*workers: Tenant | DraftWorker, seeds: tuple[int, ...] = (3, 4)) -> None:
    for worker, seed in zip(workers, seeds, strict=True):
        assert list(worker.handle(opened(1, seed=seed))) == []


def nodes(answers: list[Message]) -> list[object]:
    """All that answers say of drafted tokens."""
    return [
        (each.tokens.tolist(), each.slots.tolist(), each.dists.rows.tolist())
        if isinstance(each, Push)
        else (each.step, each.last, each.branches.tolist(), each.places.tolist(), each.tokens.tolist())
        for each in answers
        if isinstance(each, Push | PushAhead)
    ]


def apart(messages: list[Message]) -> list[list[object]]:
    """What workers of their own answer to one message each, with the seeds of `open_rows`."""
    alone = []
    for seed, message in zip((3, 4), messages, strict=True):
        worker = made()[1]
        open_rows(worker, seeds=(seed,))
        alone.append(nodes(list(worker.handle(message))))
    return alone


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 8))
def test_shares_are_equal_and_apart(blocks: int, slots: int, count: int) -> None:
    """No number is in two shares, none is outside of the worker, and each has as many as the others."""
    made = shares(blocks, slots, count)
    for whole, parts in ((blocks, [each.blocks for each in made]), (slots, [each.slots for each in made])):
        named = [number for part in parts for number in part]
        assert len(set(named)) == len(named) == count * (whole // count)
        assert set(named) <= set(range(whole))
        assert {len(part) for part in parts} == {whole // count}


@settings(deadline=None)
@given(st.lists(st.integers(-3, 40), max_size=8), st.lists(st.integers(-3, 20), max_size=8))
def test_a_plan_is_placed_inside_its_share_or_refused(tables: list[int], slots: list[int]) -> None:
    """Whatever is named, it is moved into the share when all of it is there, and refused else."""
    share = Share(range(32, 64), range(16, 32))
    asked = replace(a_plan([1]), tables=ints(tables), slots=ints(slots))
    if all(0 <= block < 32 for block in tables) and all(0 <= slot < 16 for slot in slots):
        placed = share.placed(asked)
        assert placed.tables.tolist() == [block + 32 for block in tables]
        assert placed.slots.tolist() == [slot + 16 for slot in slots]
    else:
        with pytest.raises(ProtocolError, match="share"):
            share.placed(asked)


@pytest.mark.parametrize("column", ["tables", "slots", "chain_slots", "own_blocks", "copies"])
def test_a_plan_ahead_may_name_nothing_of_others(column: str) -> None:
    """Each column of numbers is looked at, and −1 for no copy stays what it is."""
    share = Share(range(32, 64), range(16, 32))
    asked = replace(an_ahead_plan([1, 2], 2), chain_slots=ints([1]))
    placed = share.placed(replace(asked, copies=ints([-1])))
    assert isinstance(placed, PlanAhead)
    found = [getattr(placed, name).tolist() for name in ("tables", "own_blocks", "slots", "chain_slots", "copies")]
    assert found == [[32], [34, 35], [20, 21], [17], [-1]]
    with pytest.raises(ProtocolError, match="share"):
        share.placed(replace(asked, **{column: ints([32])}))


def test_each_tenant_gets_what_a_worker_of_its_own_gives(shared: Shared) -> None:
    """The same row numbers, blocks and slots on both sides: drafts and dists are those of two separate workers."""
    messages = [a_plan([1, 2, 3]), a_plan([4, 5])]
    open_rows(*shared.tenants)
    assert [nodes(each) for each in together(shared, *messages)] == apart(messages)
    assert shared.gate.sizes == [1, 2]


def test_plans_ahead_of_both_grow_in_the_same_forwards(shared: Shared) -> None:
    """Branches of different depth: each coordinator gets its own pushes, numbered and ended as by its own worker."""
    messages = [an_ahead_plan([1, 2], 4), an_ahead_plan([3, 4], 2)]
    open_rows(*shared.tenants)
    found = [nodes(each) for each in together(shared, *messages)]
    assert found == apart(messages)
    assert [len(each) for each in found] == [5, 3]
    assert shared.gate.sizes == [1, 2]


def test_a_plan_that_raises_costs_the_other_nothing(shared: Shared) -> None:
    """It fails alone, and the next plan of its coordinator is computed apart until one goes well again."""
    open_rows(*shared.tenants)
    shared.gate.poison = 7
    failed, well = together(shared, a_plan([7]), a_plan([4, 5]))
    assert isinstance(failed[0], Failed)
    assert isinstance(well[0], Push)
    shared.gate.sizes.clear()
    together(shared, a_plan([7]), a_plan([4, 5]))
    assert shared.gate.sizes == [1, 1, 1]
    together(shared, a_plan([1]), a_plan([4, 5]))
    shared.gate.sizes.clear()
    together(shared, a_plan([1]), a_plan([4, 5]))
    assert shared.gate.sizes == [1, 2]


def test_a_plan_ahead_that_raises_late_costs_the_other_one_plan_at_most(shared: Shared) -> None:
    """Pushed tokens stand, what is not over fails; after that both are computed apart, and only one of them fails."""
    open_rows(*shared.tenants)
    shared.gate.late_poison = 7
    both = together(shared, an_ahead_plan([7, 2], 3), an_ahead_plan([3, 4], 3))
    assert [[type(each) for each in answers] for answers in both] == [[PushAhead, Failed]] * 2
    failed, well = together(shared, an_ahead_plan([7, 2], 3), an_ahead_plan([3, 4], 3))
    assert [type(each) for each in failed] == [PushAhead, Failed]
    assert [type(each) for each in well] == [PushAhead] * 4


@pytest.mark.parametrize(
    "message",
    [
        plan([Part(1, 0, [1], [32], slots=[0])]),
        plan([Part(1, 0, [1], [-1], slots=[0])]),
        plan([Part(1, 0, [1], [0], slots=[16])]),
        plan([Part(1, 0, [VOCAB], [0], slots=[0])]),
        plan([Part(8, 0, [1], [0], slots=[0])]),
        replace(plan([Part(1, 0, [1], [0], slots=[0])]), feed_lengths=ints([2])),
        Cancel("1"),
    ],
    ids=["block", "negative", "slot", "token", "row", "columns", "kind"],
)
def test_a_malformed_message_fails_alone(shared: Shared, message: Message) -> None:
    """Blocks and slots of the neighbour among them: an answer that says so, and the other's drafts as always."""
    open_rows(*shared.tenants)
    before = nodes(list(shared.tenants[1].handle(a_plan([4, 5]))))
    (answer,) = shared.tenants[0].handle(message)
    assert isinstance(answer, Failed)
    assert nodes(list(shared.tenants[1].handle(a_plan([4, 5])))) == before


def test_one_that_floods_has_one_plan_in_each_turn(shared: Shared) -> None:
    """A coordinator with fifty plans ready beside one with five: the five wait for one plan of the other each."""
    open_rows(*shared.tenants)
    order: list[str] = []

    def send(tenant: Tenant, name: str, count: int) -> None:
        for number in range(count):
            list(tenant.handle(a_plan([1], number=number)))
            order.append(name)

    shared.gate.open.clear()
    threads = [
        threading.Thread(target=send, args=(tenant, name, count))
        for tenant, name, count in zip(shared.tenants, ("flood", "few"), (50, 5), strict=True)
    ]
    for thread in threads:
        thread.start()
    shared.gate.open.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    last = max(place for place, name in enumerate(order) if name == "few")
    assert order[: last + 1].count("flood") <= 2 * 5 + 2


def test_a_worker_that_is_of_no_use_any_more_ends_every_session(shared: Shared) -> None:
    """A lost rank reaches each tenant that waits as an error, which ends its heart; the next ask fails, too."""
    open_rows(*shared.tenants)
    shared.gate.lost = True
    for tenant in shared.tenants:
        with pytest.raises(GroupLost):
            list(tenant.handle(a_plan([1])))


def test_a_closed_worker_answers_nobody(shared: Shared) -> None:
    """What comes after the end is refused at once instead of waiting for ever."""
    open_rows(*shared.tenants)
    shared.turns.close()
    with pytest.raises(Unavailable):
        list(shared.tenants[0].handle(a_plan([1])))
