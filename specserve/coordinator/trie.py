"""A request's live drafted nodes, rooted at its last committed token.

Nodes are kept as parallel arrays; a parent always stands before its children. Keyed by token path: what was drafted
for a future that did not happen is dropped, and a subtree that survives a commit is the next draft as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.coordinator.slots import SlotPool
from specserve.errors import ProtocolError
from specserve.transport.messages import Dists

ROOT = -1
NO_SLOT = -1
"""Nodes of a model-free speculator have no dist and hold no slot."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Drafted nodes as they arrive: parallel sequences; `parents` index into this same list, −1 is the root.

    dists says for each node where its dist lies (None: it was chosen without chance); empty for none at all.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    slots: Sequence[int]
    fed: Sequence[bool]
    sampled: Sequence[bool]
    dists: Sequence[tuple[Dists | None, int]] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """One node of a chain: its token, its slot, and where its dist lies (None when it was chosen without chance)."""

    token: int
    slot: int
    dists: Dists | None
    row: int


class Trie:
    """The nodes of one request. Slot references are taken and dropped here and nowhere else."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._slots: list[int] = []
        self._fed: list[bool] = []
        self._sampled: list[bool] = []
        self._dists: list[tuple[Dists | None, int]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, nodes: Nodes) -> None:
        """Hang nodes below the root; their slots arrive with one reference each, which the trie now owns.

        Raises ProtocolError, with nothing changed, when a parent does not stand before its child.
        """
        if any(not ROOT <= parent < index for index, parent in enumerate(nodes.parents)):
            raise ProtocolError(f"drafted nodes with impossible parents {list(nodes.parents)}")
        offset = len(self._tokens)
        for index, parent in enumerate(nodes.parents):
            absolute = ROOT if parent == ROOT else parent + offset
            if absolute != ROOT and self._slots[absolute] != NO_SLOT:
                self._pool.retain([self._slots[absolute]])
            self._parents.append(absolute)
            self._tokens.append(nodes.tokens[index])
            self._slots.append(nodes.slots[index])
            self._fed.append(bool(nodes.fed[index]))
            self._sampled.append(bool(nodes.sampled[index]))
            self._dists.append(nodes.dists[index] if nodes.dists else (None, 0))

    def chain(self, limit: int) -> list[Link]:
        """The path of first sampled children from the root, at most `limit` nodes."""
        path: list[Link] = []
        here = ROOT
        for index, parent in enumerate(self._parents):
            if len(path) == limit:
                break
            if parent == here and self._sampled[index]:
                dists, row = self._dists[index]
                path.append(Link(self._tokens[index], self._slots[index], dists, row))
                here = index
        return path

    def advance(self, tokens: Sequence[int]) -> int:
        """Move the root along committed tokens; keep what hangs below, drop the rest.

        Returns how many of the walked nodes, from the first on without a gap, had their KV written.
        """
        if not self._tokens:
            return 0
        fed, feeding, here = 0, True, ROOT
        for token in tokens:
            child = self._child(here, token)
            if child is None:
                self.clear()
                return fed
            feeding = feeding and self._fed[child]
            fed += feeding
            here = child
        self._reroot(here)
        return fed

    def _child(self, parent: int, token: int) -> int | None:
        for index in range(parent + 1, len(self._tokens)):
            if self._parents[index] == parent and self._tokens[index] == token:
                return index
        return None

    def _reroot(self, root: int) -> None:
        """Keep the strict descendants of `root`."""
        new_index: dict[int, int] = {root: ROOT}
        kept: list[int] = []
        for index in range(root + 1, len(self._tokens)):
            if self._parents[index] in new_index:
                new_index[index] = len(kept)
                kept.append(index)
        survives = set(kept)
        self._release([index for index in range(len(self._tokens)) if index not in survives], root)
        self._parents = [new_index[self._parents[index]] for index in kept]
        self._tokens = [self._tokens[index] for index in kept]
        self._slots = [self._slots[index] for index in kept]
        self._fed = [self._fed[index] for index in kept]
        self._sampled = [self._sampled[index] for index in kept]
        self._dists = [self._dists[index] for index in kept]

    def _release(self, gone: list[int], root: int) -> None:
        """Drop the references of nodes that go: their place, and the edge from each child (`root`'s edges are cut)."""
        dropped = [self._slots[index] for index in gone]
        leaving = set(gone)
        for index, parent in enumerate(self._parents):
            if parent != ROOT and (index in leaving or parent == root):
                dropped.append(self._slots[parent])
        self._pool.free([slot for slot in dropped if slot != NO_SLOT])

    def clear(self) -> None:
        """Drop every node."""
        if not self._tokens:
            return
        self._release(list(range(len(self._tokens))), ROOT)
        for column in (self._tokens, self._parents, self._slots, self._fed, self._sampled, self._dists):
            column.clear()
