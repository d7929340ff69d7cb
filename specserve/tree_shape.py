"""How large the trees of drafted tokens may be, as both sides must know: the coordinator leases, the draft grows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Limits of one request's tree.

    branching [levels] is how many children each place of a level has; none means dynamic: at most `width` places of a
    level have children, at most `width` each, and a tree has at most `most_nodes`. A place is the root, which is the
    newest committed token, or a node. The nodes of level 0 are the root's children.
    """

    branching: tuple[int, ...] | None
    width: int
    most_nodes: int

    @property
    def widest(self) -> int:
        """The most children that one place has."""
        return self.width if self.branching is None else max(self.branching)

    def nodes(self, levels: int) -> int:
        """The most nodes that a tree of so many levels has."""
        if self.branching is None:
            return min(self.most_nodes, self.width * (1 + self.width * (levels - 1))) if levels else 0
        total, level = 0, 1
        for children in self.branching[:levels]:
            level *= children
            total += level
        return total

    def parents(self, levels: int) -> int:
        """The most places that have children: the root, and nodes that the draft reads. Each has a dist in a slot."""
        if not levels:
            return 0
        read = self.nodes(levels - 1)
        return 1 + (read if self.branching is not None else min(read, self.width * (levels - 1)))

    def within(self, levels: int, nodes: int) -> int:
        """The most levels, at most `levels`, of which all nodes fit into so many positions."""
        while levels and self.nodes(levels) > nodes:
            levels -= 1
        return levels
