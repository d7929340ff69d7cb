"""How large the trees of drafted tokens may be, as both sides must know: the coordinator leases, the draft grows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Limits of one request's tree.

    branching [levels] is how many children each place of a level has; none means dynamic: at most `width` places of a
    level have children, at most `width` each. A tree has at most `most_nodes`; where that is less than all children of
    all places, it is those that seem worth most. A place is the root, which is the newest committed token, or a node.
    The nodes of level 0 are the root's children.
    """

    branching: tuple[int, ...] | None
    width: int
    most_nodes: int

    @property
    def widest(self) -> int:
        """The most children that one place has."""
        return self.width if self.branching is None else max(self.branching)

    def children(self, level: int) -> int:
        """The most children of a place, whose own level `level` is (0 has the root's)."""
        return self.width if self.branching is None else self.branching[level]

    @property
    def parents_in_level(self) -> int | None:
        """The most places of a level that have children; None for all of them."""
        return self.width if self.branching is None else None

    def within_nodes(self, nodes: int) -> TreeShape:
        """The same with at most so many nodes."""
        return self if nodes >= self.most_nodes else _smaller(self, nodes)

    def nodes(self, levels: int) -> int:
        """The most nodes that a tree of so many levels has."""
        return min(self.most_nodes, self.all_nodes(levels))

    def all_nodes(self, levels: int) -> int:
        """The nodes of a tree of so many levels all of whose places have all the children that they may."""
        if self.branching is None:
            return self.width * (1 + self.width * (levels - 1)) if levels else 0
        total, level = 0, 1
        for children in self.branching[:levels]:
            level *= children
            total += level
        return total

    def whole(self, levels: int, nodes: int) -> bool:
        """Whether so many nodes are all that such a tree may have, whatever they seem to be worth."""
        return self.branching is not None and nodes >= self.all_nodes(levels)

    def parents(self, levels: int) -> int:
        """The most places that may have children: the root, and nodes that the draft reads. Each has a slot's dist."""
        if not levels:
            return 0
        read = min(self.nodes(levels - 1), self.most_nodes - 1)  # the last node of a whole tree is not read
        return 1 + (read if self.branching is not None else min(read, self.width * (levels - 1)))

    def places(self, level: int) -> int:
        """The most places whose children are of this level; a draft reads them together."""
        if self.branching is None:
            return self.width if level else 1
        return prod(self.branching[:level])

    def within(self, levels: int, nodes: int) -> int:
        """The most levels, at most `levels`, of which all nodes fit into so many positions."""
        while levels and self.nodes(levels) > nodes:
            levels -= 1
        return levels


@cache
def _smaller(shape: TreeShape, nodes: int) -> TreeShape:
    """Asked for each row of a round."""
    return replace(shape, most_nodes=nodes)


def static(branching: tuple[int, ...]) -> TreeShape:
    """All places of a level have so many children."""
    whole = TreeShape(branching, max(branching), 0)
    return replace(whole, most_nodes=whole.all_nodes(len(branching)))
