"""Depth by what it was measured to bring: draft slots by marginal gain, and no drafting where plain decoding is faster.

While drafting, each round admits those slots of the whole batch that make most tokens per second, by the acceptance of
every request and the measured cost of rounds. So each request has a chain of its own length or, where trees are
drafted, a tree of its own size: as many nodes as it has slots, which the draft places as its shape allows. Where a
draft says how sure it is of its tokens, all requests get drafts of one size, and what of them is checked is decided
when they are there (`offers`). Where even the best set makes no more than plain rounds, drafting stops, and is tried
now and then on a few requests to see whether it pays again. (Goodput as what to maximise, and 0 as a depth like others:
SmartSpec, Liu et al. 2024.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from specserve.config import EngineConfig
from specserve.coordinator.acceptance import Acceptance, RequestClass, class_of
from specserve.coordinator.depth import Checked, DepthPolicy, FixedDepth
from specserve.coordinator.drafting_switch import DraftingSwitch
from specserve.coordinator.forecasts import Forecasts
from specserve.coordinator.marginal_gain import Admitted, admit
from specserve.coordinator.node_worth import node_worths
from specserve.coordinator.offers import DraftSize, Sureness, Told, best_end, best_size, offered, offered_blindly
from specserve.coordinator.prompt_reading import PromptReading
from specserve.coordinator.requests import RequestState
from specserve.coordinator.round_costs import FloatArray, RoundCosts
from specserve.coordinator.scheduler import TargetRow
from specserve.transport.messages import Array
from specserve.tree_shape import TreeShape, static
from specserve.types import RoundStats, RowId

_TRIED_REQUESTS = 4
"""Requests that take part in a trial of drafting."""

_DELIVERY_WEIGHT, _TRIAL_WEIGHT = 0.1, 0.03
"""Of one round in the running mean of what was delivered; in a trial a worker has only a few to deliver to."""

_HOPEFUL = 8
"""Of so many rounds with drafts, one has the slots that would be best if all went well: what is never tried is never
learned."""

_HOPES, _TRIAL_HOPES, _ACCEPTANCE_HOPES = 2.0, 1.0, 0.75
"""How many spreads better than expected costs may be in such rounds, and in trials, which are more of a risk; and each
share of what is kept in both."""

_DOUBTS = 4.0
"""Spreads that the gain must be above nothing, lest plain rounds be tried again."""

_OVERRATED = 0.4
"""By how much a gain is overrated where several decode, for the share of rounds whose requests are not those of the
round before. With eight at once under a steady load, a quarter of all rounds, gains of 1.04 to 1.10 turned out as 0.90
to 0.96: rounds that begin and end answers are not those that costs are learned from."""

_NEVER_S = 1e9
"""The cost of what is not to be chosen."""

_LIKE = 1.5
"""Less than so many times as many requests, or as few, are held to be like those of the last look."""

_RESTING = 4
"""Of so many rounds while drafting is off, one is learned from: all are alike, and learning takes time, too."""

_COLD = 0.35
"""By how much, in parts, the first round with drafts after one without takes longer than the next."""

_CHANGED_WEIGHT, _CHANGING = 1 / 16, 0.4
"""Of one round in the share of those with other requests than the round before; and the share up to which nothing is
learned from them, as they pay for coming and going. Where most rounds do, all are learned from."""


class DraftTiming(Enum):
    """When drafts are made, and so what they cost."""

    WAITED = auto()  # the round waits for its own drafts
    AHEAD = auto()  # beside the round before: hidden, and not there when another outcome came
    FREE = auto()  # guessed at once, or not at all


_TRIAL_ROUNDS = {DraftTiming.WAITED: 4, DraftTiming.AHEAD: 4, DraftTiming.FREE: 2}
"""Rounds of a trial of drafting. Where drafts are not free, the first one is there for the sake of the next: its drafts
come for that one, or it pays for what was left undone."""

_PROBATION_ROUNDS = {DraftTiming.WAITED: 0, DraftTiming.AHEAD: 32, DraftTiming.FREE: 0}
"""Rounds after such a trial that are judged with it. A worker that makes drafts for a few in time may not do so for
all: where nobody waits for it, only this shows it."""


class AdaptiveDepth:
    """A `DepthPolicy` that learns. `limits` bounds every depth that it gives, and is at least 1."""

    def __init__(self, limits: FixedDepth, timing: DraftTiming) -> None:
        self._limits = limits
        self._timing = timing
        self._switch = DraftingSwitch(_TRIAL_ROUNDS[timing], _PROBATION_ROUNDS[timing])
        self._costs = RoundCosts()
        self._reading = PromptReading()
        self._forecasts = Forecasts()
        self._shape = static((1,) * limits.depth) if limits.tree is None else limits.tree
        self._acceptance = Acceptance(limits.depth, self._shape.widest)
        self._sureness = Sureness(limits.depth)
        self._levels = 1  # of drafts, where they say how sure they are
        self._nodes = 1  # and nodes
        self._made = 0, 0  # levels, and places that got tokens, of what was drafted for this round, where it waited
        self._delivered = 1.0  # share of what admitted drafts promise that is there in time
        self._gain = 1.0  # of drafting over plain decoding
        self._since_offer = 0
        self._warm = self._was_warm = False  # the last round had drafts, and the one before it
        self._last_rows: set[RowId] = set()
        self._changed = 0.0  # share of rounds that had other requests than the one before them
        self._drafted_rounds = 0
        self._looked_rows = 0  # requests that there were at the last look
        self._looked_kinds: set[RequestClass] = set()  # and of which classes
        self._unlearned = 0  # rounds since one was learned from
        self._hopeful = False  # this round has the slots that would be best if all went well
        self._tried: list[RowId] = []
        self._next_tried = 0
        self._depths: dict[RowId, int] = {}
        self._slots: dict[RowId, int] = {}
        self._guessed: dict[RowId, int] = {}  # the most tokens of guesses that nobody waits for
        self._kinds: dict[RowId, RequestClass] = {}  # of those that offer tokens by how sure a model is of them
        self._ranked: set[RowId] = set()  # these, and those whose guesses are ranked among theirs
        self._ahead: dict[RowId, int] = {}
        self._asked: dict[RowId, int] = {}  # of `_ahead`, what was drafted for beside the last round

    @property
    def depth(self) -> int:
        """See `DepthPolicy`."""
        return self._limits.depth

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

    def guessed(self, state: RequestState) -> int:
        """All that can be used, where it is seen to later what of it is checked (`offer`)."""
        return self._guessed.get(state.row, 0)

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
        self._depths, self._slots, self._guessed, self._kinds = {}, {}, {}, {}
        self._ranked, self._hopeful, self._made = set(), False, (0, 0)
        if not any(map(self.wanted, states)):
            return
        another = self._acceptance.meet(states)
        if another:
            self._sureness.keep([state.row for state in states])
        due = self._switch.advance()
        if (due or self._are_others(states, another)) and not self._switch.trial_left:
            self._look(states)
        if self._switch.consider_trial(self._may_be_wrong(states), another) and self._switch.trying:
            self._choose_tried(states)
        if not self._switch.active:
            self._asked = {}
            return
        self._admit(states, self._limits_of(states))
        asking = [state for state in states if self.drafting(state)]
        self._asked = {state.row: self._ahead.get(state.row, self.depth) for state in asking}

    def _are_others(self, states: Sequence[RequestState], another: bool) -> bool:
        """Whether a look at these requests, `another` of them new, may find what the last one did not.

        Nothing was seen of it, so while nothing is drafted it is how many there are that counts, and of which kinds.
        """
        if self._switch.on:
            return another
        fewer, more = sorted((len(states), self._looked_rows))
        return more >= _LIKE * fewer or (another and set(map(class_of, states)) != self._looked_kinds)

    def _may_be_wrong(self, states: Sequence[RequestState]) -> bool:
        """Whether the other state may yet be the better one: as to drafting always, once there is something to beat."""
        rows = len(states)
        if not self._switch.on:
            return self._costs.knows(rows)
        doubt = self._costs.doubt(rows, rows + sum(self._ahead.get(state.row, 0) for state in states))
        return math.log(self._gain) < _DOUBTS * doubt

    def _limits_of(self, states: Sequence[RequestState]) -> Array:
        return np.array([self._limits.of(state) for state in states])

    def _look(self, states: Sequence[RequestState]) -> None:
        """Turn drafting on or off by what it would bring with all drafts at hand, and see for whom it would.

        How much of their answers is left does not count: others will come.
        """
        self._looked_rows, self._looked_kinds = len(states), set(map(class_of, states))
        limits = np.array([self.wanted(state) for state in states])
        plain_s = self._costs.plain_s(len(states))
        best = self._best_of_sure(states, limits) if self._are_sure(states) else self._best_by_average(states, limits)
        if best is None or plain_s is None or not self._costs.checked.index:
            return
        dearer = self._forecasts.drafted_over_plain / (1 - self._reading.share)
        if self._timing is DraftTiming.WAITED:
            dearer *= 1 + _OVERRATED * self._changed * (1 - 1 / len(states))
        self._gain = best.goodput * plain_s / len(states) / dearer
        self._ahead = {state.row: slots for state, slots in zip(states, best.slots.tolist(), strict=True)}
        self._switch.look(self._gain)

    def _best_by_average(self, states: Sequence[RequestState], limits: Array) -> Admitted | None:
        return self._best(*self._worth(states), limits, self._delivered)

    def _told_of(self, state: RequestState) -> bool:
        """Whether drafts for requests like this one say how sure they are."""
        return self.wanted(state) > 0 and self._sureness.knows(class_of(state))

    def _are_sure(self, states: Sequence[RequestState]) -> bool:
        """Whether any drafts for these say how sure they are. Those of a class that is new will, if they ever do."""
        return any(map(self._told_of, states))

    def _best_of_sure(self, states: Sequence[RequestState], limits: Array) -> Admitted | None:
        """The best size of drafts, and what of them would be checked on average; None while no round was measured.

        What is drafted for others costs and brings the same, whatever is decided here.
        """
        rows = len(states)
        if self._costs.plain_s(rows) is None or self._costs.drafting(1, 1.0) is None:
            return None
        sure = np.array([self._told_of(state) for state in states])
        told = [state for state in states if self._told_of(state)]
        imagined = self._sureness.imagined([state.row for state in told], [class_of(state) for state in told])
        size, goodput, slots = best_size(
            [worths._replace(values=self._delivered * worths.values) for worths in imagined],
            limits[sure],
            rows,
            lambda slots: self._costs.seconds(rows, slots),
            self._sizes(len(told)),
        )
        self._levels, self._nodes = size.levels, size.nodes
        usual = max(1, round(slots / len(told)))
        return Admitted(np.where(sure, np.minimum(limits, usual), 0), goodput)

    def _sizes(self, drafts: int) -> list[DraftSize]:
        """Chains, the largest trees, and trees between them, of each number of levels."""
        sizes: list[tuple[int, int]] = []
        for levels in range(1, min(self._limits.depth, self._shape.most_nodes) + 1):
            most = self._shape.nodes(levels)
            sizes += [(levels, nodes) for nodes in sorted({levels, (levels + most + 1) // 2, most})]
        found: list[DraftSize] = []
        for levels, nodes in sizes:
            places = drafts * self._shape.within_nodes(nodes).parents(levels) / levels
            found.append(DraftSize(levels, nodes, self._costs.drafting(levels, places) or 0.0))
        return found

    def _choose_tried(self, states: Sequence[RequestState]) -> None:
        """The next few in turn, so that no request stands for all."""
        wanting = [state.row for state in states if self.wanted(state)]
        first = self._next_tried % len(wanting)
        self._next_tried = first + _TRIED_REQUESTS
        self._tried = [*wanting[first:], *wanting[:first]][:_TRIED_REQUESTS]

    def _admit(self, states: Sequence[RequestState], limits: Array) -> None:
        """Slots for the round; of drafts made ahead only those that are there."""
        there = limits
        if self._timing is DraftTiming.AHEAD:
            there = np.minimum(limits, [len(state.chain.tokens) for state in states])
        trying = self._switch.trying
        if self._timing is DraftTiming.WAITED and self._are_sure(states):
            depths, slots = self._drafts_of_sure(states, limits)
            guessed = np.where(depths > 0, limits, 0)
        else:
            slots = self._trial(states, there) if trying else self._most_gain(states, limits, there)
            guessed = depths = np.minimum(slots, there)  # a tree goes as deep as it has nodes, if the draft is so sure
        rows = [state.row for state in states]
        self._depths = dict(zip(rows, depths.tolist(), strict=True))
        self._slots = dict(zip(rows, slots.tolist(), strict=True))
        self._guessed = dict(zip(rows, guessed.tolist(), strict=True))

    def _drafts_of_sure(self, states: Sequence[RequestState], limits: Array) -> tuple[Array, Array]:
        """Levels, the same for all that take part, and tokens; now and then more, so that larger ones are known."""
        self._drafted_rounds += 1
        trying = self._switch.trying
        if not trying and self._drafted_rounds % _HOPEFUL == 0:
            self._hopeful = self._switch.may_lose
        part = np.array([not trying or state.row in self._tried for state in states])
        levels = np.where(part, np.minimum(limits, self._levels + self._hopeful), 0)
        shape = self._shape if self._hopeful else self._shape.within_nodes(self._nodes)
        return levels, np.array([shape.nodes(count) for count in levels.tolist()])

    def offer(self, rows: Sequence[TargetRow]) -> None:
        """Of drafts that say how sure they are, what is worth checking."""
        if self._timing is not DraftTiming.WAITED:
            return
        pairs = [
            (row, row.state.chain.first(row.depth)) for row in rows if row.due and row.depth and row.state.chain.tokens
        ]
        made = [(row, draft) for row, draft in pairs if row.state.guessed_by is None]
        self._made = max((draft.depth for _, draft in made), default=0), sum(draft.dist_count for _, draft in made)
        for row, draft in made:
            if draft.sureness:
                kind = self._kinds[row.state.row] = class_of(row.state)
                large = row.shape is None or row.shape.most_nodes >= self._shape.most_nodes
                self._sureness.saw(row.state.row, kind, Told(draft.sureness, draft.above), large=large)
        # Guesses for requests that no model drafts for are learned of as any other draft that says nothing of itself.
        sure = [(row, draft) for row, draft in pairs if draft.sureness and self._told_of(row.state)]
        if not sure:
            return
        self._ranked = {row.state.row for row, _ in sure}
        told = [Told(draft.sureness, draft.above) for _, draft in sure]
        if self._costs.plain_s(len(rows)) is not None:
            others = sum(len(draft) for row, draft in pairs if row.state.row not in self._ranked)
            self._choose_offered([row for row, _ in sure], told, len(rows), others)

    def _choose_offered(self, sure: Sequence[TargetRow], told: Sequence[Told], rows: int, others: int) -> None:
        """others: tokens that are checked in any case."""
        drafts = self._sureness.worths([self._kinds.get(row.state.row) for row in sure], told)
        hopes = _TRIAL_HOPES if self._switch.trying else _HOPES if self._hopeful else 0.0
        blind = any(row.state.request.sampling.temperature > 0 for row in sure)
        tokens = sum(len(each.parents) for each in told)
        most = sum(each.parents.count(-1) for each in told) + len(told) if blind else tokens
        slots = others + np.arange(most + 1, dtype=np.float64)
        # By what was planned, not by what came: where a chain ended early its own tokens may be why.
        waited = [row for row in sure if row.state.guessed_by is None]
        levels = max((row.depth for row in waited), default=0)
        made = sum(row.places for row in waited)
        drafting_s = (self._costs.drafting(levels, made / levels) if levels else None) or 0.0
        seconds = self._costs.seconds(rows, slots, hopes) + drafting_s
        if blind:
            chosen = offered_blindly(drafts, rows, seconds)
        else:
            falling = -np.sort(-drafts.values, axis=None)[:tokens]
            chosen = offered(drafts.values, best_end(falling, rows, seconds))
        if self._switch.trying and not chosen.any():
            chosen[int(drafts.values[:, 0].argmax()), 0] = True
        for row, levels_of, mine in zip(sure, drafts.levels, chosen, strict=True):
            row.chosen = np.flatnonzero(mine).tolist()
            row.depth = self._depths[row.state.row] = int(levels_of[mine].max(initial=-1)) + 1
            self._slots[row.state.row] = len(row.chosen)

    def _size_of_drafts(self) -> tuple[int, float]:
        """Levels, and places of each, of what was drafted for this round."""
        levels, places = self._made
        return levels, places / max(1, levels)

    def _trial(self, states: Sequence[RequestState], there: Array) -> Array:
        """The slots that would be best if all went well, at least one, for the requests that take part."""
        tried = np.array([state.row in self._tried for state in states])
        if self._timing is DraftTiming.AHEAD and not self._switch.trial_begins and tried.any():
            self._count_delivered(float((there[tried] > 0).mean()), _TRIAL_WEIGHT)
        there = np.where(tried, there, 0)
        best = self._best(*self._worth(states, _ACCEPTANCE_HOPES), there, 1.0, _TRIAL_HOPES)
        return self._all_slots(there) if best is None else best.slots

    def _most_gain(self, states: Sequence[RequestState], limits: Array, there: Array) -> Array:
        self._drafted_rounds += 1
        if self._drafted_rounds % _HOPEFUL == 0:
            self._hopeful = self._switch.may_lose
        hopes = _HOPES if self._hopeful else 0.0
        worth, levels = self._worth(states, _ACCEPTANCE_HOPES if self._hopeful else 0.0)
        if self._timing is DraftTiming.AHEAD:
            asked = np.minimum(limits, [self._asked.get(state.row, 0) for state in states])
            promised = _expected(worth, levels, asked)
            if promised > 0:
                self._count_delivered(_expected(worth, levels, np.minimum(asked, there)) / promised)
            best = self._best(worth, levels, there, 1.0, hopes)
        else:
            best = self._best(worth, levels, limits, self._delivered, hopes)
        return self._all_slots(there) if best is None else best.slots

    def _all_slots(self, depths: Array) -> Array:
        """The most that drafts of these depths have."""
        return np.array([self._shape.nodes(depth) for depth in depths.tolist()])

    def _worth(self, states: Sequence[RequestState], hopes: float = 0.0) -> tuple[FloatArray, Array]:
        """What each slot of each request is worth, and its level: see `node_worths`."""
        return node_worths(self._acceptance.shares([state.row for state in states], hopes), self._shape)

    def _best(
        self, worth: FloatArray, levels: Array, limits: Array, delivered: float, hopes: float = 0.0
    ) -> Admitted | None:
        """The best set of slots that is not empty, as far as there are any; None while no round was measured.

        Whether it is better than none is the switch's to say: from round to round noise would.
        """
        rows, costs = len(limits), self._costs
        if costs.plain_s(rows) is None:
            return None

        def seconds(slots: FloatArray) -> FloatArray:
            found = costs.seconds(rows, slots, hopes)
            found[0] = _NEVER_S
            return found

        return admit(worth, levels, limits, seconds, costs.step_seconds(), delivered)

    def _count_delivered(self, share: float, weight: float = _DELIVERY_WEIGHT) -> None:
        self._delivered += weight * (share - self._delivered)

    # ---- learning

    def rests(self, rows: int) -> bool:
        """Whether a round of one token for each of so many requests is one more of many that are alike: see `rest`."""
        off = not (self._switch.active or self._switch.charging)
        return off and self._unlearned + 1 < _RESTING and self._costs.measured(self._costs.plain, rows)

    def rest(self, rows: set[RowId], seconds: float) -> None:
        """Such a round took so long: what `observe` would do, without the numbers that nothing is learned from."""
        self._since_offer += 1
        if self._timing is DraftTiming.WAITED:
            self._reading.observe(seconds, 0)
        self._count_changed(rows)
        self._unlearned += 1
        self._was_warm, self._warm = self._warm, False

    def observe(self, stats: RoundStats, checked: Sequence[Checked]) -> None:
        """Learn from a round: of acceptance always, of costs where it held decode rows only."""
        self._since_offer += 1
        offers = [each for each in checked if each.offered]
        unsure = [each for each in offers if each.row not in self._ranked]
        if unsure:
            self._acceptance.observe(unsure, self._since_offer)
            self._since_offer = 0
        sure = [each for each in offers if each.row in self._kinds]
        if sure:
            self._sureness.observe([self._kinds[each.row] for each in sure], [each.tried for each in sure])
        nodes = sum(each.nodes for each in offers)
        planned = sum(self._slots.get(each.row, 0) for each in checked)
        if planned and self._timing is not DraftTiming.AHEAD:
            self._count_delivered(nodes / planned)
        deepest = max((each.offered for each in checked), default=0)
        if self._timing is DraftTiming.WAITED:
            levels, made = self._size_of_drafts()
            made = max(made, len(checked))
            self._observe_reading(stats, levels, made)
        else:
            levels, made = deepest, max(len(checked), nodes / (deepest or 1))
        changed = self._count_changed({each.row for each in checked})
        if checked and not stats.prefill_tokens:
            self._observe_costs(stats, levels, made, changed)
            if self._switch.charging or self._hopeful:
                self._charge(stats, levels, made, sum(each.kept + 1 for each in checked))

    def _observe_reading(self, stats: RoundStats, levels: int, made: float) -> None:
        """made: places of each level that got tokens."""
        costs, switch = self._costs, self._switch
        self._reading.observe(stats.wall_s, stats.prefill_tokens)
        drafting = costs.drafting(levels, made)
        if drafting is None or not switch.active:
            return
        waited_s = min(stats.draft_busy_s, stats.wall_s)
        # To read takes a draft no longer than the target takes for the rest; a draft that hangs does not read.
        beyond_s = min(waited_s - costs.pace * drafting, stats.wall_s - waited_s)
        if switch.on:
            self._reading.observe_draft(beyond_s, stats.prefill_tokens)
        elif levels and (plain_s := costs.plain_s(stats.rows)):
            # A trial pays for what it had to read, also beside others' prompts.
            switch.charge(max(0.0, beyond_s) / (costs.pace * plain_s))

    def _count_changed(self, rows: set[RowId]) -> bool:
        """Whether a round is one that nothing is learned from, because its requests are not those of the last."""
        changed = rows != self._last_rows
        self._last_rows = rows
        self._changed += _CHANGED_WEIGHT * (changed - self._changed)
        return changed and self._changed < _CHANGING

    def _observe_costs(self, stats: RoundStats, levels: int, made: float, changed: bool) -> None:
        """But not of the first round with drafts after one without: it feeds what the draft lacks, to cold caches.

        levels: of what was drafted, though perhaps nothing of it was checked; made: tokens of each.
        """
        costs, waited_s = self._costs, 0.0
        self._unlearned += 1
        self._was_warm, self._warm = self._warm, levels > 0
        costs.pass_round(stats.rows, stats.rows * (1 + self._shape.most_nodes), self._unlearned)
        self._unlearned = 0
        if changed or (levels and not self._was_warm and self._timing is DraftTiming.WAITED):
            return
        checks = stats.positions > stats.rows
        kind = costs.checked if checks else costs.bare if self._switch.active else costs.plain
        if (levels > 0) == self._switch.active and costs.measured(
            costs.checked if checks else costs.plain, stats.positions
        ):
            self._forecasts.observe(levels > 0, stats.wall_s, costs.pace * self._cost(stats, levels, made))
        if self._timing is DraftTiming.WAITED:
            waited_s = min(stats.draft_busy_s, stats.wall_s)
            if levels and waited_s > 0:
                costs.observe_draft(levels, round(made), waited_s)
        costs.observe(kind, stats.positions if checks else stats.rows, stats.wall_s - waited_s)

    def _charge(self, stats: RoundStats, levels: int, made: float, tokens: int) -> None:
        """What a round lost, in plain rounds, against the state that is interrupted: by what such rounds cost.

        Not by what it took: that it was late, or came just when the machine's pace changed, is no fault of its drafts.
        """
        plain_s = self._costs.plain_s(stats.rows)
        if plain_s is None:
            return
        cost = self._cost(stats, levels, made)
        if self._switch.active and not levels:
            # Drafts that are made beside a round may slow it down, too, be it only their host.
            cost = max(cost, self._costs.bare_s(stats.rows) or 0.0)
        if levels and not self._was_warm and self._timing is DraftTiming.WAITED:
            cost *= 1 + _COLD
        gained = tokens / stats.rows / (max(1.0, self._gain) if self._switch.proven else 1.0)
        self._switch.charge(cost / plain_s - gained)

    def _cost(self, stats: RoundStats, levels: int, made: float) -> float:
        """What a round of decode rows is held to cost, its drafts included; 0 while nothing is known."""
        costs, rows, slots = self._costs, stats.rows, stats.positions - stats.rows
        plain_s = costs.plain_s(rows) or 0.0
        if not levels or not plain_s:
            return plain_s
        cost = float(costs.seconds(rows, np.array([0.0, slots]))[1])
        return cost + (costs.drafting(levels, made) or 0.0)


def policy_of(config: EngineConfig, timing: DraftTiming, target_context: int, draft_context: int | None) -> DepthPolicy:
    """The policy that is configured; contexts in positions, None without a draft model."""
    limits = FixedDepth(config.depth, target_context, draft_context, config.tree_shape)
    return limits if config.depth_policy == "fixed" or not limits.depth else AdaptiveDepth(limits, timing)


def _expected(worth: FloatArray, levels: Array, depths: Array) -> float:
    """Tokens expected of drafts of these depths."""
    return float(worth[levels < depths[:, None]].sum())
