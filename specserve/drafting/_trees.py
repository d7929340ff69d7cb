"""Trees that grow level by level: which places get how many children, and which tokens these are.

A place is the root (−1), which is the last token that was fed, or a node. Siblings under sampling are drawn without
replacement (Chen et al., "Sequoia", 2024). Dynamic shapes follow the draft's confidence, as EAGLE-2's do (Li et al.,
2024), but look at dists only, and never take a drawn node back: a choice by a drawn token's own value would give the
answers another law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specserve.drafting import DraftedTree, Job
from specserve.drafting._chains import Chain, allowed, likeliest
from specserve.drafting._sureness import exp_sums, of_drawn
from specserve.drafting.workspace import Workspace
from specserve.models import TokenTree
from specserve.models._stretches import Stretch
from specserve.sampling.dists import process
from specserve.sampling.noise import Purpose, node_places, token_keys, uniform
from specserve.sampling.profiles import Settings
from specserve.transport.messages import Array
from specserve.tree_shape import TreeShape

_NO_SLOTS = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _Tree:
    """The tree of one job. worth [nodes]: how probable it seems that the target's answer goes through each node.

    places get children next, beginning with family `families`; level is theirs.
    """

    job: Job
    grown: DraftedTree = field(default_factory=DraftedTree)
    worth: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=lambda: [-1])
    families: int = 0
    level: int = 0

    def path(self, place: int) -> list[int]:
        """The tokens to a place."""
        tokens: list[int] = []
        while place >= 0:
            tokens.append(self.grown.tokens[place])
            place = self.grown.parents[place]
        return tokens[::-1]

    def worth_of(self, place: int) -> float:
        """Of a place; the root is certain."""
        return self.worth[place] if place >= 0 else 1.0

    def add(self, each: _Place, tokens: Sequence[int]) -> None:
        """A place's children, up to the first that is none (−1)."""
        before = self.worth_of(each.place)
        for token, chance in zip(tokens, each.chances, strict=False):
            if token < 0:
                return
            self.grown.tokens.append(token)
            self.grown.parents.append(each.place)
            self.grown.families.append(each.family)
            self.grown.sureness.append(chance)
            self.worth.append(before * chance)

    def left(self) -> int:
        """Nodes that it may still have."""
        return self.job.nodes - len(self.grown.tokens)

    def next_level(self, new: Sequence[int], shape: TreeShape) -> None:
        """Of the nodes that are new, all, or as many as may be of those worth most, get children next."""
        self.families += len(self.places)
        self.level += 1
        going_on = self.level < self.job.levels and self.left() > 0
        best = sorted(new, key=lambda node: -self.worth[node])[: shape.parents_in_level]
        self.places = sorted(best) if going_on else []

    def feed(self) -> Stretch:
        """The row that reads the places, and shows what follows each."""
        fed = self.grown.fed
        start = self.job.first + len(fed)
        fed += self.places
        stored = {node: at for at, node in enumerate(fed)}
        parents = [stored.get(self.grown.parents[node], -1) for node in fed]
        tree = TokenTree(self.job.first, np.array(parents, dtype=np.int64))
        tokens = [self.grown.tokens[node] for node in self.places]
        return Stretch(start, tokens, self.job.table, len(tokens), tree=tree)


@dataclass(frozen=True, slots=True)
class _Place:
    """One row of logits: a place, its family, its children's chances there, and the first one's rank in its level."""

    tree: _Tree
    place: int
    family: int
    chances: Sequence[float] = ()
    rank: int = 0


class Growth:
    """The trees of one plan's jobs, of which those without levels are fed only."""

    def __init__(self, jobs: Sequence[Job], shape: TreeShape, vocab_size: int, workspace: Workspace) -> None:
        self._all = [_Tree(job, places=[-1] if job.levels else []) for job in jobs]
        # Where dists are kept at all they are shipped of all trees, so each level has some.
        self._drawn = any(job.profile.temperature > 0 for job in jobs if job.levels)
        self._shape = shape
        self._vocab_size = vocab_size
        self._workspace = workspace

    @property
    def trees(self) -> list[DraftedTree]:
        """What has grown, in the jobs' order."""
        return [tree.grown for tree in self._all]

    @property
    def slots(self) -> Array:
        """int64 [m]: the slots of the places whose logits are to be taken next."""
        return _slots(self._places())

    @property
    def slots_before(self) -> Array:
        """int64 [T]: of each node in the last `stretches`, the slot of the place before it."""
        fed = [(tree.job.slots, tree.grown.families[node]) for tree in self._growing() for node in tree.places]
        return np.array([slots[family] for slots, family in fed], dtype=np.int64)

    @property
    def origins(self) -> Array:
        """int64 [rows]: the first position that may be read, of each row in the last `stretches`."""
        return np.array([tree.job.origin for tree in self._growing()], dtype=np.int64)

    def _places(self) -> list[_Place]:
        growing = self._growing()
        return [_Place(tree, place, tree.families + at) for tree in growing for at, place in enumerate(tree.places)]

    def _growing(self) -> list[_Tree]:
        return [tree for tree in self._all if tree.places]

    def stretches(self) -> list[Stretch]:
        """The rows of the next forward; none when all have grown."""
        return [tree.feed() for tree in self._growing()]

    def take(self, logits: torch.Tensor) -> None:
        """Add a level, from logits [m, V] behind the places of all growing trees, which may be changed."""
        growing, places = self._growing(), self._places()
        if not places:
            return
        paths = [
            Chain(each.tree.job.profile, each.tree.job.first, _NO_SLOTS, False, each.tree.path(each.place))
            for each in places
        ]
        logits = allowed(logits, paths, self._vocab_size)
        best = _best(logits, self._shape.widest, self._vocab_size)
        settings = Settings.of([each.tree.job.profile for each in places]) if self._drawn else None
        if settings is not None:
            self._keep(places, settings, logits)
        if all(map(self._whole, growing)) and not self._workspace.notes_sureness:
            chances = [[1.0] * self._shape.children(each.tree.level) for each in places]
        else:
            chances = self._wanted(growing, places, self._chances(places, settings, logits, best))
        places = self._allot(places, chances, best.sound.tolist())
        before = [len(tree.grown.tokens) for tree in growing]
        self._add(places, settings, best)
        for tree, first in zip(growing, before, strict=True):
            tree.next_level(range(first, len(tree.grown.tokens)), self._shape)

    def _whole(self, tree: _Tree) -> bool:
        """Whether it has room for all children that its places may have, so that none needs to be chosen."""
        return self._shape.whole(tree.job.levels, tree.job.nodes)

    def _keep(self, places: Sequence[_Place], settings: Settings, logits: torch.Tensor) -> None:
        """Keep what tokens are drawn from, by logits [m, V]."""
        dist = process(logits, settings.temperature, settings.top_p, settings.top_k, self._vocab_size, settings.min_p)
        self._workspace.put(_slots(places), dist)

    def _wanted(self, growing: Sequence[_Tree], places: Sequence[_Place], chances: Array) -> list[list[float]]:
        """Of these `_chances` of each place's first, second, … child those of as many as it is to have."""
        all_chances = [
            row[: self._shape.children(each.tree.level)] for each, row in zip(places, chances.tolist(), strict=True)
        ]
        worths = [
            [each.tree.worth_of(each.place) * chance for chance in row]
            for each, row in zip(places, all_chances, strict=True)
        ]
        counts: list[int] = []
        for tree in growing:
            mine = [worth for each, worth in zip(places, worths, strict=True) if each.tree is tree]
            if self._whole(tree):
                counts += map(len, mine)
            else:
                counts += shares(mine, tree.left(), tree.level + 1, tree.job.levels - tree.level - 1)
        return [row[:count] for row, count in zip(all_chances, counts, strict=True)]

    def _chances(self, places: Sequence[_Place], settings: Settings | None, logits: torch.Tensor, best: _Best) -> Array:
        """float32 [m, width]: how often the first, second, … child of each place seems to be what comes next.

        The likeliest tokens have their probabilities. A drawn one is kept as often as both models' dists overlap
        (`of_drawn`), and each next sibling is taken to have that share of what the ones before it left.
        """
        width = min(self._shape.widest, self._vocab_size)
        chances = _probabilities(logits[:, : self._vocab_size], best, width)
        drawn = np.array([] if settings is None else settings.temperature.numpy().nonzero()[0], dtype=np.int64)
        if len(drawn):
            overlap = of_drawn(self._workspace.peaks(_slots(places)[drawn]))[:, None]
            chances[drawn] = overlap * (1 - overlap) ** np.arange(width)
        return chances

    def _allot(
        self, places: Sequence[_Place], chances: Sequence[Sequence[float]], finite: Sequence[bool]
    ) -> list[_Place]:
        """The places with their children's chances, none where nothing can follow, and ranks in their level."""
        allotted: list[_Place] = []
        ranks: dict[int, int] = {}
        for each, row, sound in zip(places, chances, finite, strict=True):
            rank = ranks.get(id(each.tree), 0)
            mine = row if sound else ()
            allotted.append(_Place(each.tree, each.place, each.family, mine, rank))
            ranks[id(each.tree)] = rank + len(mine)
        return allotted

    def _add(self, places: Sequence[_Place], settings: Settings | None, best: _Best) -> None:
        width = max(len(each.chances) for each in places)
        if width:
            for each, tokens in zip(places, self._pick(places, width, settings, best).tolist(), strict=True):
                each.tree.add(each, tokens)

    def _pick(self, places: Sequence[_Place], width: int, settings: Settings | None, best: _Best) -> torch.Tensor:
        """int64 [m, width]: children of each place, in order; −1 where there are no more."""
        tokens = torch.full((len(places), width), -1)
        tokens[:, : best.ids.shape[1]] = torch.from_numpy(best.ids[:, :width])
        if settings is None:
            return tokens
        greedy = settings.temperature == 0
        raced = torch.tensor([each.tree.job.shared_noise for each in places])
        slots = _slots(places)
        levels = torch.tensor([each.tree.level for each in places])
        positions = torch.tensor([each.tree.job.first for each in places]) + levels
        for rows in _index(~greedy & raced):
            keys = token_keys(settings.seeds[rows], positions[rows], settings.branches[rows])
            tokens[rows] = self._workspace.finishers(slots[rows.numpy()], width, keys).cpu()
        ranks = torch.tensor([each.rank for each in places])[:, None] + torch.arange(width)
        for rows in _index(~greedy & ~raced):
            seeds, branches = settings.seeds[rows, None], settings.branches[rows, None]
            noise = uniform(
                seeds, Purpose.PROPOSE, positions[rows, None], branches, node_places(levels[rows, None], ranks[rows])
            )
            tokens[rows] = self._workspace.draw_siblings(slots[rows.numpy()], noise).cpu()
        return tokens


def shares(worths: Sequence[Sequence[float]], left: int, seen: int, unseen: int) -> list[int]:
    """How many children each place gets, where `left` nodes are left for this level and `unseen` more below it.

    worths [places, width] are those of a place's likeliest children, of level `seen` from 1 on, best first. The most
    valuable nodes are taken; in levels that nobody has seen yet a path is held to lose what the best one has lost in
    each level so far. So a sure draft keeps its nodes for depth, an unsure one spends them on width.
    """
    counts = [0] * len(worths)
    here = sorted(((worth, place) for place, row in enumerate(worths) for worth in row if worth > 0), reverse=True)
    if not here:
        return counts
    loss = here[0][0] ** (1 / seen)
    below = [worth * loss**step for worth, _ in here for step in range(1, unseen + 1)]
    for number, (worth, place) in enumerate(here):
        if number + sum(1 for other in below if other > worth) >= left:
            break
        counts[place] += 1
    return counts


@dataclass(frozen=True, slots=True)
class _Best:
    """The largest logits of each row: values float32 and ids int64, [m, n], −1 where there are no more.

    The first one is the one that a chain would pick. sound [m]: something can follow, and nothing is NaN or infinitely
    likely.
    """

    values: Array
    ids: Array
    sound: Array


def _best(logits: torch.Tensor, width: int, vocab_size: int) -> _Best:
    """Of logits [m, V]."""
    values, ids = likeliest(logits[:, :vocab_size], max(2, width))
    return _Best(values, ids, np.isfinite(values[:, 0]))


def _probabilities(logits: torch.Tensor, best: _Best, width: int) -> Array:
    """float32 [m, width]: those of the likeliest ids under the softmax of logits [m, V]; 0 where a row is not sound."""
    highest = np.where(best.sound, best.values[:, 0], np.inf)
    sums = exp_sums(logits, highest)
    with np.errstate(all="ignore"):
        found = np.minimum(np.exp(best.values[:, :width] - highest[:, None]) / sums[:, None], 1)
    return np.where(best.sound[:, None], found, 0).astype(np.float32)


def _index(mask: torch.Tensor) -> list[torch.Tensor]:
    rows = mask.nonzero().squeeze(1)
    return [rows] if len(rows) else []


def _slots(places: Sequence[_Place]) -> Array:
    return np.array([each.tree.job.slots[each.family] for each in places], dtype=np.int64)
