"""What all sources have in common whose drafts come from a draft worker: its caches, its channel, and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from specserve.config import EngineConfig
from specserve.coordinator.activity import Activity
from specserve.coordinator.batches import CheckedRow, open_message
from specserve.coordinator.chain import NOTHING, Chain
from specserve.coordinator.commits import Commit
from specserve.coordinator.depth import DepthPolicy
from specserve.coordinator.layouts import Layout
from specserve.coordinator.prefix_cache import pool_of
from specserve.coordinator.requests import RequestState
from specserve.coordinator.rounds import Round
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.sharing import shareable, siblings
from specserve.coordinator.slot_waits import SlotWaits
from specserve.coordinator.slots import SlotPool
from specserve.errors import ChannelError
from specserve.metrics import EngineMetrics
from specserve.transport import Channel
from specserve.transport.messages import Close, Failed, Message, Verdict
from specserve.types import AheadStats, WorkerInfo


class Opened(Protocol):
    """A row of a plan, as far as opening it goes."""

    @property
    def state(self) -> RequestState: ...
    @property
    def epoch(self) -> int: ...


class WorkerLink:
    """One life of a draft worker: its KV blocks, its slots and the way to it."""

    def __init__(
        self,
        config: EngineConfig,
        info: WorkerInfo,
        channel: Channel,
        life: int,
        slots: SlotPool,
        policy: DepthPolicy,
        metrics: EngineMetrics,
        activity: Activity,
        slot_waits: SlotWaits,
    ) -> None:
        self.activity = activity
        self.life = life
        self.slots = slots
        self.blocks = pool_of(config, info)
        self.dists = Layout("dists")
        self.busy_s = 0.0
        self.broken = False  # the channel refused a message: the engine treats the worker as lost
        self.config = config
        self.reads_hidden = info.reads_hidden
        self.context = info.context_length
        self.vocab_size = info.vocab_size
        self.policy = policy
        self.metrics = metrics
        self.slot_waits = slot_waits
        self._channel = channel
        self._plans = 0

    def number_plan(self) -> int:
        """The next number: no two plans of one life of the worker have the same, whichever way they were made."""
        self._plans += 1
        return self._plans

    def send(self, message: Message) -> None:
        """Hand a message over; a channel that refuses it marks the worker as broken."""
        try:
            self._channel.send(message)
        except ChannelError:
            self.broken = True

    def open(self, rows: Iterable[Opened]) -> None:
        """Tell the worker of requests that it has not heard of in their present epoch."""
        for row in rows:
            state = row.state
            if state.draft_opened != (self.life, row.epoch):
                state.draft_opened = (self.life, row.epoch)
                state.draft_known = len(state.tokens)
                self.send(open_message(state, self.config.rule))

    def share(self, state: RequestState, among: Sequence[RequestState]) -> None:
        """Take over what a sibling has of the prompt, or what is cached of the request."""
        if state.draft_table:
            return
        positions = shareable(state, self.blocks.block_tokens)
        filled = [
            each for each in siblings(state, among) if each.draft_cached >= positions and each.draft_origin < positions
        ]
        if positions and filled:
            state.draft_table = self.blocks.fork(filled[0].draft_table, positions)
            state.draft_cached, state.draft_origin = positions, filled[0].draft_origin
        elif not state.draft_cached:
            state.draft_cached = self.blocks.reuse(state.draft_table, state.keys)

    def remember(self, state: RequestState) -> None:
        """Others may go on from the full blocks of what is committed and covered."""
        self.blocks.remember(state.draft_table, state.keys, state.draft_cached)

    def distrust(self, states: Iterable[RequestState]) -> None:
        """A plan of these raised: nothing says what its blocks hold, nor what led to that."""
        self.blocks.void()
        for state in states:
            self.drop_cache(state)

    def make_room(self, state: RequestState, positions: int, taken: set[int], among: Sequence[RequestState]) -> bool:
        """Cover `positions`; where blocks lack, the least promising requests lose their cache. False: no room at all.

        Those in `taken` keep theirs.
        """
        while not self.blocks.cover(state.draft_table, positions):
            victims = [each for each in among if each.draft_table and each is not state and each.row not in taken]
            if not victims:
                return False
            self.drop_cache(min(victims, key=promise))
        return True

    def drop_cache(self, state: RequestState) -> None:
        """The draft covers nothing of this request any more."""
        self.blocks.clear(state.draft_table)
        state.draft_cached = state.draft_origin = 0

    def put_chain(self, state: RequestState, chain: Chain) -> None:
        """Replace what is drafted for the request; the new chain's slots come with a reference each."""
        if state.chain.slots:
            self.slots.free(state.chain.held)
        state.chain = chain

    def release(self, state: RequestState) -> None:
        """The request is over, or begins anew."""
        self.slot_waits.forget(state.row)
        self.put_chain(state, NOTHING)
        self.remember(state)
        self.drop_cache(state)
        if state.draft_opened is not None and state.draft_opened[0] == self.life:
            state.draft_opened = None
            self.send(Close(state.row))

    def close(self, states: Iterable[RequestState]) -> None:
        """The worker is gone, and with it what it held of these requests."""
        for state in states:
            self.slot_waits.forget(state.row)
            self.put_chain(state, NOTHING)
            state.draft_opened = None
            self.drop_cache(state)
        self._channel.close()


def takes_turns(config: EngineConfig, target: WorkerInfo, draft: WorkerInfo) -> bool:
    """Whether draft and target cannot both work at once, or are not to: R = 0."""
    if config.tree_shape is not None:
        return True
    if config.outcomes == "auto":
        # A head's steps are short beside the target's, and its chains are better where they begin at its state.
        return draft.reads_hidden or draft.place == target.place
    return config.outcomes == 0


class Planned(Opened, Protocol):
    """A row of a plan, as far as its share of the batch goes."""

    @property
    def feed(self) -> int: ...


class _Stateful(Protocol):
    @property
    def state(self) -> RequestState: ...


Row = TypeVar("Row", bound=_Stateful)
Made = TypeVar("Made", bound=Planned)


def fit(
    rows: Sequence[Row],
    budget: int,
    plan: Callable[[Row, int, set[int], Sequence[RequestState]], Made | None],
) -> list[Made]:
    """Plan rows, the most promising first, within a budget of fed tokens.

    plan gets a row, what is left of the budget, the rows planned so far, whose caches stay, and all requests, of which
    the least promising lose theirs when KV runs short.
    """
    planned: list[Made] = []
    taken: set[int] = set()
    among = [row.state for row in rows]
    promises = [-promise(state) for state in among]
    for place in sorted(range(len(rows)), key=promises.__getitem__):
        state = among[place]
        made = plan(rows[place], budget, taken, among)
        if made is not None:
            planned.append(made)
            taken.add(state.row)
            budget -= made.feed
    return planned


def promise(state: RequestState) -> float:
    """Share of drafts that the target kept so far, with a prior of one half."""
    return (state.kept + 1) / (state.drafted + 2)


class WorkerSource(ABC):
    """A `drafts.DraftSource` that one life of a draft worker feeds."""

    def __init__(self, link: WorkerLink) -> None:
        self.link = link

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """A round waits for what was asked of the worker."""

    @property
    @abstractmethod
    def leasing(self) -> bool:
        """Slots or blocks are out on lease to the worker."""

    @property
    @abstractmethod
    def leased(self) -> int:
        """Slots that the worker may fill."""

    @property
    @abstractmethod
    def overdue_s(self) -> float | None:
        """The clock time from which on a worker that has not answered counts as lost; None while nothing is asked."""

    @abstractmethod
    def begin(self, rows: list[TargetRow]) -> bool:
        """See `drafts.DraftSource`."""

    @abstractmethod
    def ahead(self, rows: list[CheckedRow], now_s: float) -> None:
        """See `drafts.DraftSource`."""

    @abstractmethod
    def committed(self, commits: Sequence[Commit]) -> None:
        """See `drafts.DraftSource`."""

    @abstractmethod
    def settled(self, now_s: float) -> None:
        """See `drafts.DraftSource`."""

    @abstractmethod
    def tidy(self) -> None:
        """See `drafts.DraftSource`."""

    def foreseen(self, due: int) -> AheadStats:
        """How the last round's `due` rows stood to what was drafted ahead of it."""
        return AheadStats(unprepared=due)

    def shows(self, state: RequestState, end: int) -> int:
        """How many of the request's tokens up to position `end` have their hidden states wanted of the target."""
        del state, end
        return 0

    def shown(self, current: Round, verdict: Verdict) -> None:
        """A verdict came, whose tokens are not committed yet. Raises ProtocolError for states that are not its."""
        del current, verdict

    @abstractmethod
    def forget(self, state: RequestState) -> None:
        """See `drafts.DraftSource`."""

    @abstractmethod
    def receive(self, message: Message, now_s: float) -> None:
        """Take in what the worker sent. Raises ProtocolError for what it may never send."""

    @abstractmethod
    def failed(self, failure: Failed) -> None:
        """What the worker was asked for raised."""

    @abstractmethod
    def lose(self, states: Sequence[RequestState]) -> None:
        """The worker is gone: everything that was leased to it, and every cache it held, is void."""
