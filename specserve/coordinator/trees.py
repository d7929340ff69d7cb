"""Drafted trees: chains that branch. Like a chain, a tree is a value, and whoever holds it owns references to slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specserve.coordinator.chain import Chain
from specserve.errors import ProtocolError
from specserve.transport.messages import Array


@dataclass(slots=True, eq=False)
class Tree(Chain):
    """Nodes level by level, each behind its parent (−1: the newest committed token); siblings are different tokens.

    slots are one for each family of siblings, in order; families [nodes] number them, and never fall. Where the tokens
    were drawn, a family's dist is row + its number of `dists`. The KV of the first `fed` tokens of the tree's spine
    stands where a chain's would.
    """

    parents: list[int] = field(default_factory=list)
    families: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """Its levels."""
        return max(self.levels, default=-1) + 1

    @property
    def above(self) -> list[int]:
        """Each node's parent."""
        return self.parents

    @property
    def dist_count(self) -> int:
        """One for each family."""
        return len(self.slots)

    def dist_places(self, first: int) -> list[int]:
        """See `Chain`."""
        return [first + family for family in self.families]

    def first(self, count: int) -> Chain:
        """The first `count` levels of it."""
        if count >= self.depth:
            return self
        return self.only(range(sum(1 for level in self.levels if level < count)))

    def only(self, numbers: Sequence[int]) -> Tree:
        """See `Chain`. Families keep their numbers, and so their slots."""
        place = {number: at for at, number in enumerate(numbers)}
        families = [self.families[number] for number in numbers]
        parents = [place.get(self.parents[number], -1) for number in numbers]
        levels = [self.levels[number] for number in numbers]
        spine = self._first_children()[: self.fed]
        fed = next((at for at, number in enumerate(spine) if number not in place), self.fed)
        return Tree(
            [self.tokens[number] for number in numbers],
            self.slots[: families[-1] + 1] if families else [],
            fed,
            self.dists,
            self.row,
            parents,
            families,
            levels,
            sureness=[self.sureness[number] for number in numbers] if self.sureness else [],
        )

    def _first_children(self) -> list[int]:
        """The first children from the root on."""
        spine: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (spine[-1] if spine else -1):
                spine.append(node)
        return spine

    def tried(self, last: int) -> list[tuple[float, bool]]:
        """See `Chain`: the children of the places on the way to node `last`, and its own."""
        way = {-1}
        node = last
        while node >= 0:
            way.add(node)
            node = self.parents[node]
        turns = zip(self.sureness, self.parents, strict=False)
        return [(sure, node in way) for node, (sure, parent) in enumerate(turns) if parent in way]

    def path(self, last: int) -> list[int]:
        """The tokens from the first one to node `last`; none for −1."""
        tokens: list[int] = []
        while last >= 0:
            tokens.append(self.tokens[last])
            last = self.parents[last]
        return tokens[::-1]

    def length(self, last: int) -> int:
        """See `Chain`."""
        return self.levels[last] + 1 if last >= 0 else 0

    def reach(self, last: int) -> int:
        """How many tokens the longest path through node `last` has."""
        below = {last}
        reach = 0 if last < 0 else self.levels[last] + 1
        for node, parent in enumerate(self.parents):
            if parent in below:
                below.add(node)
                reach = max(reach, self.levels[node] + 1)
        return reach

    def met(self, last: int) -> list[tuple[int, int]]:
        """The families of siblings on the way to node `last` and behind it: how many each had, and which was next.

        The last one is followed by −1, where it has nodes at all: none of them was.
        """
        ends, node = [-1], last
        while node >= 0:
            ends.append(node)
            node = self.parents[node]
        met: list[tuple[int, int]] = []
        parent = -1
        for node in ends[::-1]:
            siblings = [each for each, above in enumerate(self.parents) if above == parent]
            if siblings:
                met.append((len(siblings), siblings.index(node) if node >= 0 else -1))
            parent = node
        return met

    def fed_along(self, tokens: Sequence[int]) -> int:
        """How many of these committed tokens were drafted on the spine and fed."""
        node = -1
        for place, token in enumerate(tokens[: self.fed]):
            node = next((each for each, parent in enumerate(self.parents) if parent == node), -1)
            if node < 0 or self.tokens[node] != token:
                return place
        return min(self.fed, len(tokens))


def levels_of(parents: Sequence[int]) -> list[int]:
    """Each node's level, from 0 on; parents stand before their children."""
    levels: list[int] = []
    for parent in parents:
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
    return levels


def tree_of(
    tokens: list[int], parents: list[int], slots: list[int], fed: list[bool], sureness: list[float] | None = None
) -> Tree:
    """The tree of these nodes, all as they were pushed. Raises ProtocolError for what is no tree, level by level."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ProtocolError(f"node {node} of a tree stands behind node {parent}")
    levels = levels_of(parents)
    held = list(dict.fromkeys(slots))
    places = {slot: number for number, slot in enumerate(held)}
    families = [places[slot] for slot in slots]
    of_family = dict(zip(families, parents, strict=True))
    ordered = levels == sorted(levels) and families == sorted(families)
    whole = len(set(parents)) == len(held) and all(of_family[f] == p for f, p in zip(families, parents, strict=True))
    if not ordered or not whole or len(set(zip(parents, tokens, strict=True))) < len(tokens):
        raise ProtocolError("a tree whose families are not those of its nodes' parents, level by level")
    return Tree(tokens, held, _spine(parents, fed), None, 0, parents, families, levels, sureness=sureness or [])


def _spine(parents: Sequence[int], fed: Sequence[bool]) -> int:
    """How many nodes, from the first one on, were fed one behind the other."""
    spine, before = 0, -1
    for node in np.flatnonzero(fed).tolist():
        if parents[node] != before:
            break
        spine, before = spine + 1, node
    return spine


def split(column: Array, lengths: Sequence[int]) -> list[list[int]]:
    """A column's rows of these lengths, which add up to it."""
    values, rows, at = column.tolist(), [], 0
    for length in lengths:
        rows.append(values[at : at + length])
        at += length
    return rows
