"""Where drafts come from, as the engine sees it: a draft worker, a model-free guesser, or nowhere.

Each source is asked once per round (`begin`), may need waiting for, and is told what was committed and forgotten.
Drafts land in the requests' tries; the engine reads chains from there and knows nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specserve.coordinator.batches import CheckedRow
from specserve.coordinator.requests import RequestState
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.trie import NO_SLOT, ROOT, Nodes


class Guesser(Protocol):
    """A model-free speculator: it lives beside the coordinator and costs no round trip."""

    def open(self, row: int, tokens: Sequence[int]) -> None:
        """Learn a request's committed tokens; replaces what was known of it."""
        ...

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Append newly committed tokens."""
        ...

    def guess(self, row: int, depth: int) -> list[int]:
        """At most `depth` tokens that may follow; empty when there is no idea."""
        ...

    def close(self, row: int) -> None:
        """Forget a request."""
        ...


class DraftSource(Protocol):
    """One source of drafts for all requests."""

    def begin(self, rows: list[TargetRow]) -> bool:
        """Start drafting for the due rows, whose depth may be lowered. True when there is something to wait for."""
        ...

    def ahead(self, rows: list[CheckedRow], now_s: float) -> None:
        """The verifier has begun with these rows; what may follow can be drafted meanwhile."""
        ...

    def committed(self, state: RequestState, tokens: Sequence[int]) -> None:
        """These tokens, a due row's verdict in full, were just appended to the request."""
        ...

    def settled(self, now_s: float) -> None:
        """The verifier's round is over, and every request of it was told of its tokens."""
        ...

    def forget(self, state: RequestState) -> None:
        """The request ended or was preempted: release all that is held for it."""
        ...


class NoDrafts:
    """Plain decoding."""

    def begin(self, rows: list[TargetRow]) -> bool:
        """Every row decodes plainly."""
        for row in rows:
            row.depth = 0
        return False

    def ahead(self, rows: list[CheckedRow], now_s: float) -> None:
        """Nothing to draft."""

    def settled(self, now_s: float) -> None:
        """Nothing was drafted ahead."""

    def committed(self, state: RequestState, tokens: Sequence[int]) -> None:
        """Whatever a lost worker had drafted still in the trie follows the commit."""
        state.trie.advance(tokens)

    def forget(self, state: RequestState) -> None:
        """Drop what a lost worker may have left."""
        state.trie.clear()


class GuesserDrafts:
    """Drafts of a model-free speculator, asked at the moment they are needed."""

    def __init__(self, guesser: Guesser) -> None:
        self._guesser = guesser
        self._known: set[int] = set()

    def begin(self, rows: list[TargetRow]) -> bool:
        """Put each due row's guess into its trie."""
        for row in rows:
            if row.depth > 0:
                self._guess(row)
        return False

    def _guess(self, row: TargetRow) -> None:
        state = row.state
        if state.row not in self._known:
            self._guesser.open(state.row, state.tokens)
            self._known.add(state.row)
        tokens = self._guesser.guess(state.row, row.depth)[: row.depth]
        state.trie.clear()
        if tokens:
            n = len(tokens)
            state.trie.append(
                Nodes(tokens, list(range(ROOT, n - 1)), [NO_SLOT] * n, fed=[False] * n, sampled=[True] * n)
            )

    def ahead(self, rows: list[CheckedRow], now_s: float) -> None:
        """Guesses cost nothing at the moment they are needed."""

    def settled(self, now_s: float) -> None:
        """Nothing was drafted ahead."""

    def committed(self, state: RequestState, tokens: Sequence[int]) -> None:
        """Guesses look at all committed tokens."""
        state.trie.clear()
        if state.row in self._known:
            self._guesser.extend(state.row, tokens)

    def forget(self, state: RequestState) -> None:
        """Close the row; a preempted request is opened anew."""
        state.trie.clear()
        if state.row in self._known:
            self._known.discard(state.row)
            self._guesser.close(state.row)
