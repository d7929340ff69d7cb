"""Depth by what it was measured to bring: draft slots by marginal gain, and no drafting where plain decoding is faster.

While drafting, each round admits those slots of the whole batch that make most tokens per second, by the acceptance of
every request and the measured cost of rounds. So each request has a chain of its own length or, where trees are
drafted, a tree of its own size: as many nodes as it has slots, which the draft places as its shape allows. Where even
the best set makes no more than plain rounds, drafting stops, and is tried now and then on a few requests to see whether
it pays again. (Goodput as what to maximise, and 0 as a depth like others: SmartSpec, Liu et al. 2024.)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from specserve.config import EngineConfig
from specserve.coordinator.acceptance import Acceptance
from specserve.coordinator.costs import FloatArray, RoundCosts
from specserve.coordinator.depth import Checked, DepthPolicy, FixedDepth
from specserve.coordinator.drafting_switch import DraftingSwitch
from specserve.coordinator.marginal_gain import Admitted, admit
from specserve.coordinator.node_worth import node_worths
from specserve.coordinator.requests import RequestState
from specserve.transport.messages import Array
from specserve.tree_shape import TreeShape, static
from specserve.types import RoundStats, RowId

_TRIED_REQUESTS = 4
"""Requests that take part in a trial of drafting."""

_TRIAL_SLOTS = (1, 2, 4, 256)
"""Slots that each of them has, from trial to trial, where so many are allowed: what is never tried is never learned."""

_DELIVERY_WEIGHT = 0.1
"""Of one round in the running mean of what was delivered."""

_BELIEF_ROUNDS = 64.0
"""Rounds that the prediction counts as right for before any was measured; and how long a measured one counts."""

_OLD_NEWS = 0.05
"""How much of the correction each trial of drafting takes back: what made it may be over."""

_LATE, _SLOWEST = 1.25, 3.0
"""Times its expected length that a round counts for at most, in the correction of the gain and in what a trial lost.
Costs are medians; to count late rounds in full on one side of a comparison only would hold every gain too low."""


class DraftTiming(Enum):
    """When drafts are made, and so what they cost."""

    WAITED = auto()  # the round waits for its own drafts
    AHEAD = auto()  # beside the round before: hidden, and not there when another outcome came
    FREE = auto()  # guessed at once, or not at all


_TRIAL_ROUNDS = {DraftTiming.WAITED: 3, DraftTiming.AHEAD: 2, DraftTiming.FREE: 1}
"""Rounds of a trial of drafting. The first one is there for the sake of the next: its drafts come for that one, or it
pays for what was left undone."""


class AdaptiveDepth:
    """A `DepthPolicy` that learns. `limits` bounds every depth that it gives, and is at least 1."""

    def __init__(self, limits: FixedDepth, timing: DraftTiming) -> None:
        self._limits = limits
        self._timing = timing
        self._switch = DraftingSwitch(_TRIAL_ROUNDS[timing])
        self._costs = RoundCosts()
        self._shape = static((1,) * limits.depth) if limits.tree is None else limits.tree
        self._acceptance = Acceptance(limits.depth, self._shape.widest)
        self._delivered = 1.0  # share of what admitted drafts promise that is there in time
        self._predicted = 1.0  # gain of drafting over plain decoding
        self._plain_rounds = _BELIEF_ROUNDS  # what the tokens of measured rounds would have taken without drafts
        self._drafted_rounds = _BELIEF_ROUNDS  # what they were predicted to
        self._since_offer = 0
        self._load = 0  # rows, when they last changed by much
        self._warm = False  # the last round had drafts, too
        self._tried: list[RowId] = []
        self._next_tried = 0
        self._trials = 0
        self._depths: dict[RowId, int] = {}
        self._slots: dict[RowId, int] = {}
        self._ahead: dict[RowId, int] = {}
        self._asked: dict[RowId, int] = {}  # of `_ahead`, what was drafted for beside the last round
        self._expected_s: float | None = None

    @property
    def depth(self) -> int:
        """See `DepthPolicy`."""
        return self._limits.depth

    @property
    def gain(self) -> float:
        """How many times as fast as plain decoding drafting is held to be: as predicted, corrected by what was seen."""
        return self._predicted * self._plain_rounds / self._drafted_rounds

    def wanted(self, state: RequestState) -> int:
        """See `DepthPolicy`."""
        return self._limits.wanted(state)

    def of(self, state: RequestState) -> int:
        """What was admitted."""
        return self._depths.get(state.row, 0)

    def shape(self, state: RequestState) -> TreeShape | None:
        """One of as many nodes as were admitted."""
        tree = self._limits.tree
        return None if tree is None else tree.within_nodes(self._slots.get(state.row, 0))

    def ahead(self, state: RequestState) -> int:
        """One more than what would be admitted if every draft were there, so that it may be; 0 where nothing would."""
        if not self.drafting(state):
            return 0
        if self._switch.trying:
            return 1
        admitted = self._ahead.get(state.row, self.depth)
        return min(admitted + 1, self.wanted(state)) if admitted else 0

    def drafting(self, state: RequestState) -> bool:
        """While on, every request that wants drafts; in a trial those that take part, as long as a round follows."""
        if not self._switch.active or not self.wanted(state):
            return False
        if self._timing is DraftTiming.AHEAD and self._switch.trial_ends:
            return False
        return self._switch.on or state.row in self._tried

    # ---- planning

    def plan(self, states: Sequence[RequestState]) -> None:
        """Decide whether to draft, and how much for whom."""
        self._depths, self._slots = {}, {}
        if not any(map(self.wanted, states)):
            return
        self._note_load(len(states))
        if self._switch.advance():
            self._look(states)
        plain_known = self._costs.plain.knows(len(states))
        if self._switch.consider_trial(self.gain, plain_known) and self._switch.trying:
            self._choose_tried(states)
        if self._switch.active:
            self._admit(states, self._limits_of(states))
        asking = [state for state in states if self.drafting(state)]
        self._asked = {state.row: self._ahead.get(state.row, self.depth) for state in asking}

    def _note_load(self, rows: int) -> None:
        """Twice as many requests, or half as many, are another load: what a draft is worth depends on it."""
        if not self._load < 2 * rows < 4 * self._load:
            self._load = rows
            self._switch.load_changed()

    def _limits_of(self, states: Sequence[RequestState]) -> Array:
        return np.array([self._limits.of(state) for state in states])

    def _look(self, states: Sequence[RequestState]) -> None:
        """Turn drafting on or off by what it would bring with all drafts at hand, and see for whom it would.

        How much of their answers is left does not count: others will come.
        """
        limits = np.array([self.wanted(state) for state in states])
        self._acceptance.keep_only([state.row for state in states])
        best = self._best(*self._worth(states), limits, self._delivered)
        plain_s = self._costs.plain_s(len(states))
        if best is None or plain_s is None:
            return
        self._predicted = best.goodput * plain_s / len(states)
        self._ahead = {state.row: slots for state, slots in zip(states, best.slots.tolist(), strict=True)}
        self._switch.look(self.gain if best.slots.any() else 0.0)

    def _choose_tried(self, states: Sequence[RequestState]) -> None:
        """The next few in turn, so that no request stands for all."""
        wanting = [state.row for state in states if self.wanted(state)]
        first = self._next_tried % len(wanting)
        self._next_tried = first + _TRIED_REQUESTS
        self._tried = [*wanting[first:], *wanting[:first]][:_TRIED_REQUESTS]
        self._trials += 1

    def _admit(self, states: Sequence[RequestState], limits: Array) -> None:
        """Slots for the round; of drafts made ahead only those that are there."""
        there = limits
        if self._timing is DraftTiming.AHEAD:
            there = np.minimum(limits, [len(state.chain.tokens) for state in states])
        trying = self._switch.trying
        slots = self._trial(states, there) if trying else self._most_gain(states, limits, there)
        depths = np.minimum(slots, there)  # a tree goes as deep as it has nodes, where the draft is sure of itself
        rows = [state.row for state in states]
        self._depths = dict(zip(rows, depths.tolist(), strict=True))
        self._slots = dict(zip(rows, slots.tolist(), strict=True))

    def _trial(self, states: Sequence[RequestState], there: Array) -> Array:
        """As many slots as it is this trial's turn to have, for each request that takes part."""
        tried = np.array([state.row in self._tried for state in states])
        if self._timing is DraftTiming.AHEAD and not self._switch.trial_begins and tried.any():
            self._count_delivered(float((there[tried] > 0).mean()))
        self._expected_s = None
        most = _TRIAL_SLOTS[self._trials % len(_TRIAL_SLOTS)]
        return np.where(tried, np.minimum(self._all_slots(there), most), 0)

    def _most_gain(self, states: Sequence[RequestState], limits: Array, there: Array) -> Array:
        worth, levels = self._worth(states)
        if self._timing is DraftTiming.AHEAD:
            asked = np.minimum(limits, [self._asked.get(state.row, 0) for state in states])
            promised = _expected(worth, levels, asked)
            if promised > 0:
                self._count_delivered(_expected(worth, levels, np.minimum(asked, there)) / promised)
            best = self._best(worth, levels, there, 1.0)
        else:
            best = self._best(worth, levels, limits, self._delivered)
        self._expected_s = None if best is None else best.seconds
        return self._all_slots(there) if best is None else best.slots

    def _all_slots(self, depths: Array) -> Array:
        """The most that drafts of these depths have."""
        return np.array([self._shape.nodes(depth) for depth in depths.tolist()])

    def _worth(self, states: Sequence[RequestState]) -> tuple[FloatArray, Array]:
        """What each slot of each request is worth, and its level: see `node_worths`."""
        return node_worths(self._acceptance.shares([state.row for state in states]), self._shape)

    def _best(self, worth: FloatArray, levels: Array, limits: Array, delivered: float) -> Admitted | None:
        """The best set of slots; None while no round was measured."""
        rows, costs = len(limits), self._costs
        if costs.plain_s(rows) is None:
            return None
        return admit(worth, levels, limits, lambda slots: costs.seconds(rows, slots), costs.step_seconds, delivered)

    def _count_delivered(self, share: float) -> None:
        self._delivered += _DELIVERY_WEIGHT * (share - self._delivered)

    # ---- learning

    def observe(self, stats: RoundStats, checked: Sequence[Checked]) -> None:
        """Learn from a round: of acceptance always, of costs where it held decode rows only."""
        self._since_offer += 1
        offers = [each for each in checked if each.offered]
        if offers:
            self._acceptance.observe(offers, self._since_offer)
            self._since_offer = 0
        planned = sum(self._slots.get(each.row, 0) for each in checked)
        if planned and self._timing is not DraftTiming.AHEAD:
            self._count_delivered(sum(each.nodes for each in offers) / planned)
        if checked and not stats.prefill_tokens:
            self._observe_costs(stats, max(each.offered for each in checked))
            self._observe_gain(stats, sum(each.kept + 1 for each in checked))

    def _observe_costs(self, stats: RoundStats, deepest: int) -> None:
        """But not of the first round with drafts after one without: it feeds what the draft lacks, to cold caches."""
        costs, waited_s = self._costs, 0.0
        warm, self._warm = self._warm, deepest > 0
        if deepest and not warm and self._timing is DraftTiming.WAITED:
            return
        if self._timing is DraftTiming.WAITED:
            waited_s = min(stats.draft_busy_s, stats.wall_s)
            if deepest:
                made = max(stats.rows, round((stats.positions - stats.rows) / deepest))
                costs.draft_step.observe(made, waited_s / deepest)
        seconds = stats.wall_s - waited_s
        if deepest:
            costs.observe(costs.checked, stats.positions, seconds)
        else:
            costs.observe(costs.bare if self._switch.active else costs.plain, stats.rows, seconds)

    def _observe_gain(self, stats: RoundStats, tokens: int) -> None:
        """Charge a trial for what it lost, and compare other rounds with drafts to what was predicted of them."""
        plain_s = self._costs.plain_s(stats.rows)
        if plain_s is None:
            return
        if self._switch.charging:
            self._switch.charge(min(_SLOWEST, stats.wall_s / plain_s) - tokens / stats.rows)
        if self._switch.trying:
            self._plain_rounds += _OLD_NEWS * (self._drafted_rounds - self._plain_rounds)
        elif self._switch.active and self._expected_s is not None:
            rounds = min(stats.wall_s, _LATE * self._expected_s) / plain_s
            fade = 1 - 1 / _BELIEF_ROUNDS
            self._plain_rounds = fade * self._plain_rounds + tokens / stats.rows
            self._drafted_rounds = fade * self._drafted_rounds + self._predicted * rounds


def policy_of(config: EngineConfig, timing: DraftTiming, target_context: int, draft_context: int | None) -> DepthPolicy:
    """The policy that is configured; contexts in positions, None without a draft model."""
    limits = FixedDepth(config.depth, target_context, draft_context, config.tree_shape)
    return limits if config.depth_policy == "fixed" or not limits.depth else AdaptiveDepth(limits, timing)


def _expected(worth: FloatArray, levels: Array, depths: Array) -> float:
    """Tokens expected of drafts of these depths."""
    return float(worth[levels < depths[:, None]].sum())
