"""Rounds of a made-up machine for a depth policy to plan: what they cost and how often drafts are kept is known.

A policy sees of each round what an engine would tell it: times with noise, in spells in which everything is slower, and
which drafts were kept, by chance. It is judged by what its choices cost and bring on average, so that luck plays no
part, and beside it every fixed size in the same rounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from specserve.coordinator.adaptive_depth import AdaptiveDepth, DraftTiming
from specserve.coordinator.chain import Chain
from specserve.coordinator.depth import Checked, FixedDepth
from specserve.coordinator.node_worth import node_worths
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.trees import Tree, tree_of
from specserve.tree_shape import TreeShape, static
from specserve.types import RoundStats, RowId, Sampling


@dataclass(frozen=True)
class Machine:
    """What rounds take in a quiet hour, in ms: a verification by positions, and a step of drafting by tokens.

    first_ms: what the first of a round's steps takes more than the others.

    cold: as many times as long as otherwise takes the target's part of the first round with drafts after one without.
    unread_ms: what such a round also waits for, as the draft reads what came meanwhile.
    noise: the spread of a round's length, in logarithms. late: how often it is late by 1.1 to 3 times.
    spells: so many rounds on average lie between two, which are half as long. several: how much more than one row a
    row more costs in a spell that makes all twice as slow.
    """

    verify_ms: Callable[[float], float]
    step_ms: Callable[[float], float]
    first_ms: float = 0.45
    cold: float = 1.35
    unread_ms: float = 0.0
    noise: float = 0.04
    late: float = 0.08
    spells: float = 400.0
    several: float = 0.012


@dataclass(frozen=True)
class Kind:
    """Requests that are alike: how often drafts are kept by level and rank, and at which temperature they decode.

    sure: drafts say of each token how likely it stays, which is all between never and always; claimed: as what power
    of that they say it. Of siblings each next one has a part of what is left.
    """

    chances: tuple[tuple[float, ...], ...]
    temperature: float = 0.0
    spread: float = 0.15  # from request to request, as a share of the chance
    sure: bool = False
    claimed: float = 1.0
    depth: int | None = None  # that the requests ask for

    def of_one(self, draw: random.Random) -> np.ndarray:
        """The chances of one request."""
        return np.array(self.chances) * draw.uniform(1 - self.spread, 1 + self.spread)


@dataclass(frozen=True)
class Phase:
    """So many rounds of these requests, which come at its beginning and are gone behind it."""

    kinds: Sequence[Kind]
    rounds: int


@dataclass
class Account:
    """Of some rounds: what they took, and what their tokens would have taken at each fixed size, in the same unit."""

    took: float = 0.0
    sizes: dict[int, float] = field(default_factory=dict)

    def add(self, other: Account) -> None:
        self.took += other.took
        for size, seconds in other.sizes.items():
            self.sizes[size] = self.sizes.get(size, 0.0) + seconds

    @property
    def gain(self) -> float:
        """How many times as fast as plain decoding the best fixed size is."""
        return self.sizes[0] / min(self.sizes.values())


class Pretended:
    """One machine's life."""

    def __init__(
        self,
        machine: Machine,
        seed: int,
        timing: DraftTiming = DraftTiming.WAITED,
        shape: TreeShape | None = None,
        depth: int = 3,
        hit: float = 0.75,
    ) -> None:
        self.policy = AdaptiveDepth(FixedDepth(depth, 10**6, None, shape), timing)
        self.machine, self.timing, self.hit = machine, timing, hit
        self.depth, self.tree = depth, shape is not None
        self.shape = shape or static((1,) * depth)
        self.draw = random.Random(seed)
        self.pace, self.drift, self.left, self.spell = 1.0, 0.0, 0, False
        self.seen: dict[tuple[bool, int], int] = {}
        self.rows = 0
        self.warm = False
        self.sizes: list[list[int]] = []
        self.chances: dict[int, np.ndarray] = {}
        self.sure: dict[int, float] = {}  # requests whose drafts say how sure they are, and what they claim
        self.drafted: dict[int, Chain] = {}  # what such a request has in this round, with the chances it has
        self.usual: dict[tuple[int, int, int], float] = {}  # what such a request's drafts are worth on average
        self.trees: dict[tuple[int, int, int], tuple] = {}

    def run(self, phases: Sequence[Phase]) -> list[Account]:
        return [self.phase(phase) for phase in phases]

    def phase(self, phase: Phase) -> Account:
        states = self.come(phase.kinds)
        self.warm = False
        self.round(states, prefill=40)
        return total([self.round(states) for _ in range(phase.rounds)])

    def come(self, kinds: Sequence[Kind]) -> list[SimpleNamespace]:
        """New requests of these kinds."""
        states = []
        for kind in kinds:
            self.rows += 1
            request = SimpleNamespace(depth=kind.depth, source=None, sampling=Sampling(temperature=kind.temperature))
            fields = {"request": request, "longest": 10**6, "tokens": [], "guessed_by": None}
            states.append(SimpleNamespace(row=RowId(self.rows), chain=Chain(), **fields))
            self.chances[self.rows] = kind.of_one(self.draw)
            if kind.sure:
                self.sure[self.rows] = kind.claimed
        return states

    def round(self, states, prefill=0) -> Account:
        self.move()
        if prefill:
            self.policy.plan([])
            self.policy.observe(self.stats(1, prefill, prefill, 0.050, 0.0), [])
            return Account()
        self.policy.plan(states)
        asking = [self.policy.drafting(state) for state in states]
        planned = [self.planned(state) for state in states]
        offered = [size if self.there(asks) else (0, 0) for size, asks in zip(planned, asking, strict=True)]
        rows_checked = [self.checked_row(state, *size) for state, size in zip(states, offered, strict=True)]
        self.policy.offer(rows_checked)
        if self.sure:
            offered = [(len(row.draft), row.depth) for row in rows_checked]
        checks = [self.check(row, *size) for row, size in zip(rows_checked, offered, strict=True)]
        rows, nodes = len(states), sum(count for count, _ in offered)
        levels = max((depth for _, depth in planned), default=0)
        made = sum(row.state.chain.dist_count for row in rows_checked) if self.sure else sum(n for n, _ in planned)
        target, draft = self.cost(rows, nodes, levels, made)
        if any(asking) and not levels and self.timing is DraftTiming.WAITED:
            draft = self.machine.step_ms(rows) * self.pace  # it is fed all the same
        if levels and not self.warm and self.timing is DraftTiming.WAITED:
            target *= self.machine.cold
            draft += self.machine.unread_ms * self.pace
        self.warm = levels > 0
        tokens = sum(expected for _, expected in checks)
        taken = self.noise(target, (nodes > 0, rows + nodes)), self.noise(draft, (True, -levels))
        stats = self.stats(rows, rows + nodes, 0, sum(taken) / 1000, taken[1] / 1000)
        if not nodes and self.policy.rests(rows):
            self.policy.rest({state.row for state in states}, stats.wall_s)
        else:
            self.policy.observe(stats, [checked for checked, _ in checks])
        self.sizes.append([count for count, _ in offered])
        if self.timing is DraftTiming.AHEAD:
            self.draft_ahead(states)
        return Account((target + draft) / self.pace, self.of_fixed(states, tokens))

    def checked_row(self, state, nodes, depth) -> TargetRow:
        """As an engine has it when the drafts are there."""
        if state.row in self.sure:
            chain = self.drafted[state.row] = self.grown(state.row, nodes, depth)
            chain = _claiming(chain, self.sure[state.row])
        else:
            chain = _Grown(nodes, depth) if self.tree else Chain([1] * depth)
        with_chain = SimpleNamespace(**vars(state) | {"chain": chain})
        return TargetRow(with_chain, 0, 1, depth, True, self.policy.shape(state))

    def grown(self, row, nodes, depth) -> Chain:
        """A new draft, of the most valuable nodes; on average first tokens are kept as often as those of its kind."""
        if not self.tree:
            return Chain([1] * depth, sureness=[self.chance(row, level) for level in range(depth)])
        found: list[tuple[float, int, int, float]] = []  # worth, parent, level, chance
        places = [(-1, 1.0)]
        for level in range(depth):
            children = []
            for place, worth in places:
                left = 1.0
                for _ in range(self.shape.children(level)):
                    chance = left * self.chance(row, level)
                    left -= chance
                    children.append((worth * chance, place, level, chance))
            first = len(found)
            found += children
            best = sorted(range(first, len(found)), key=lambda node: -found[node][0])[: self.shape.parents_in_level]
            places = [(node, found[node][0]) for node in sorted(best)]
        kept = sorted(sorted(range(len(found)), key=lambda node: (-found[node][0], node))[:nodes])
        number = {node: at for at, node in enumerate(kept)}
        parents = [number.get(found[node][1], -1) for node in kept]
        families = {parent: at for at, parent in enumerate(dict.fromkeys(parents))}
        slots, fed = [families[parent] for parent in parents], [False] * len(kept)
        return tree_of(list(range(len(kept))), parents, slots, fed, [found[node][3] for node in kept])

    def chance(self, row, level) -> float:
        mean = float(self.chances[row][level, 0])
        return self.draw.betavariate(0.8 * mean / (1 - mean), 0.8)

    def worth_of_sure(self, row, nodes, depth) -> float:
        """Tokens that a whole draft of such a request brings on average."""
        key = row, nodes, depth
        if key not in self.usual:
            self.usual[key] = sum(_worth(self.grown(row, nodes, depth)) for _ in range(200)) / 200
        return self.usual[key]

    def planned(self, state) -> tuple[int, int]:
        """Nodes and levels."""
        depth, shape = self.policy.of(state), self.policy.shape(state)
        return (depth if shape is None else shape.nodes(depth) if depth else 0), depth

    def there(self, asks: bool) -> bool:
        """Whether what was planned is there; what was drafted ahead was planned because it is."""
        return self.timing is DraftTiming.AHEAD or (
            asks and (self.timing is DraftTiming.WAITED or self.draw.random() < self.hit)
        )

    def draft_ahead(self, states) -> None:
        for state in states:
            deep = min(self.policy.ahead(state), self.depth) if self.policy.drafting(state) else 0
            state.chain.tokens = [1] * (deep if self.draw.random() < self.hit else 0)

    def of_fixed(self, states, tokens: float) -> dict[int, float]:
        """What so many tokens would have taken by size, in this round."""
        found = {}
        for size in range(self.shape.most_nodes + 1):
            made, taken = self.fixed(states, size)
            found[size] = tokens / made * taken / self.pace
        return found

    def cost(self, rows, nodes, levels, made=None) -> tuple[float, float]:
        """ms at the pace of now: the target's, and what the round waits for the draft, which made so many tokens."""
        positions = rows + nodes
        slow = self.pace ** (1 + self.machine.several * (positions - 1))
        draft = 0.0
        if levels and self.timing is DraftTiming.WAITED:
            draft = (
                self.machine.first_ms + levels * self.machine.step_ms(max(rows, (made or nodes) / levels))
            ) * self.pace
        return self.machine.verify_ms(positions) * slow, draft

    def fixed(self, states, size) -> tuple[float, float]:
        """Tokens and ms on average of a round where everyone has `size` slots."""
        depth = min(size, self.depth)
        share = 1.0 if self.timing is DraftTiming.WAITED else self.hit
        made = 0.0
        for state in states:
            grows = self.tree and state.row in self.sure
            worth = self.worth_of_sure if grows else lambda *size: self.tree_of(*size)[1]
            made += 1 + share * (worth(state.row, size, depth) if size else 0.0)
        if self.timing is DraftTiming.WAITED:
            return made, sum(self.cost(len(states), len(states) * size, depth))
        return made, sum(self.cost(len(states), round(share * len(states) * size), depth))

    def tree_of(self, row, nodes, depth):
        """How many children each place that ranks lead to has, and what all nodes together are worth."""
        if not nodes:
            return {(): 0}, 0.0
        key = (row, nodes, depth)
        if key not in self.trees:
            self.trees[key] = _tree(self.chances[row][:depth], self.shape, nodes)
        return self.trees[key]

    def check(self, checked, nodes, depth):
        """What is kept by chance, and how many tokens it is on average."""
        state = checked.state
        if state.row in self.sure:
            offered, sure = checked.draft, self.drafted[state.row].first(depth)
            sure = sure if checked.chosen is None else sure.only(checked.chosen)
            last = self.walk(sure)
            met = offered.met(last) if self.tree and nodes else None
            tried = offered.tried(last) if nodes else ()
            return Checked(state.row, depth, offered.length(last), nodes, met, tried), 1 + _worth(sure)
        families, worth = self.tree_of(state.row, nodes, depth)
        chances, path, met = self.chances[state.row], (), []
        while siblings := families.get(path, 0):
            chance, rank = self.draw.random(), -1
            for each in range(siblings):
                chance -= chances[len(path)][each]
                if chance < 0:
                    rank = each
                    break
            met.append((siblings, rank))
            if rank < 0:
                break
            path = (*path, rank)
        deepest = max((len(each) + 1 for each, count in families.items() if count), default=0)
        return Checked(state.row, deepest, len(path), nodes, met if self.tree else None), 1 + worth

    def walk(self, sure: Chain) -> int:
        """The last token that is kept of these, which have their chances."""
        last, above = -1, list(sure.above)
        while True:
            chance = self.draw.random()
            for node in [node for node, parent in enumerate(above) if parent == last]:
                chance -= sure.sureness[node]
                if chance < 0:
                    last = node
                    break
            else:
                return last

    def noise(self, ms, what) -> float:
        if not ms:
            return 0.0
        draw, count = self.draw, self.seen.get(what, 0)
        self.seen[what] = count + 1
        ms *= math.exp(draw.gauss(0, self.machine.noise)) * (2.0, 1.3, 1.0)[min(count, 2)]
        if draw.random() < self.machine.late:
            ms *= 1.1 + min(1.9, draw.expovariate(1 / 0.4))
        return ms

    def move(self) -> None:
        """The pace of the next round."""
        if self.machine.spells:
            self.left -= 1
            if self.left <= 0:
                self.spell = not self.spell if self.left == 0 else False
                mean = self.machine.spells / (2 if self.spell else 1)
                self.left = 1 + int(self.draw.expovariate(1 / mean))
                self.slow = self.draw.uniform(1.2, 2.0) if self.spell else 1.0
            self.drift = 0.99 * self.drift + self.draw.gauss(0, 0.007)
            self.pace = self.slow * math.exp(self.drift)

    def stats(self, rows, positions, prefill, wall_s, draft_s) -> RoundStats:
        return RoundStats(rows, positions, prefill, wall_s, draft_s, 0.0, 0.0, (), (), 0, 0, 0)


@dataclass
class _Grown:
    """A tree, as far as its size goes."""

    nodes: int
    depth: int
    sureness: tuple[float, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [1] * self.nodes

    @property
    def dist_count(self) -> int:
        return self.nodes

    def __len__(self) -> int:
        return self.nodes

    def first(self, depth: int) -> _Grown:
        return self if depth >= self.depth else _Grown(0, 0)


def _claiming(draft: Chain, power: float) -> Chain:
    """The same draft, which says of its chances that they are this power of what they are."""
    claimed = [chance**power for chance in draft.sureness]
    if isinstance(draft, Tree):
        return tree_of(draft.tokens, draft.parents, draft.families, [False] * len(draft), claimed)
    return Chain(draft.tokens, sureness=claimed)


def _worth(sure: Chain) -> float:
    worths: list[float] = []
    for chance, parent in zip(sure.sureness, sure.above, strict=True):
        worths.append(chance * (worths[parent] if parent >= 0 else 1.0))
    return sum(worths)


def _tree(chances, shape, nodes):
    """The most valuable nodes of a tree of this shape."""
    worths, _ = node_worths(chances[None], shape)
    paths, places = [], [((), 1.0)]
    for level in range(len(chances)):
        children = [
            ((*ranks, rank), worth * chances[level][rank])
            for ranks, worth in places
            for rank in range(shape.children(level))
        ]
        children.sort(key=lambda each: -each[1])
        paths += children
        places = children if shape.parents_in_level is None else children[: shape.parents_in_level]
    paths.sort(key=lambda each: (-each[1], len(each[0])))
    families: dict[tuple[int, ...], int] = {}
    for ranks, _ in paths[:nodes]:
        families[ranks[:-1]] = families.get(ranks[:-1], 0) + 1
    return families, float(worths[0][:nodes].sum())


def total(accounts: Sequence[Account]) -> Account:
    """All of these together."""
    found = Account()
    for each in accounts:
        found.add(each)
    return found


def against_plain(accounts: Sequence[Account]) -> float:
    """Tokens per second of the policy, as many times plain decoding."""
    found = total(accounts)
    return found.sizes[0] / found.took


def against_best(accounts: Sequence[Account]) -> float:
    """Likewise of the size that was best in each phase, in hindsight."""
    return sum(min(each.sizes.values()) for each in accounts) / sum(each.took for each in accounts)
