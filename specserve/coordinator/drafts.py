"""Where drafts come from, as the engine sees it: a draft worker, a model-free guesser, or nowhere.

Each source is asked once per round (`begin`), may need waiting for, and is told what was committed and forgotten.
Drafts land in the requests' chains; the engine reads them there and knows nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specserve.coordinator.batches import CheckedRow
from specserve.coordinator.chain import NOTHING, Chain
from specserve.coordinator.commits import Commit
from specserve.coordinator.requests import RequestState
from specserve.coordinator.scheduler import TargetRow


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

    def committed(self, commits: Sequence[Commit]) -> None:
        """The tokens of these were just appended to their requests, which go on: each a due row's verdict in full."""
        ...

    def settled(self, now_s: float) -> None:
        """The verifier's round is over, and what it committed was told."""
        ...

    def tidy(self) -> None:
        """The verifier is busy, or there is nothing for it to do: time for what nobody waits for."""
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

    def tidy(self) -> None:
        """Nothing was put off."""

    def committed(self, commits: Sequence[Commit]) -> None:
        """What was looked up for these stands behind tokens that are no longer the newest."""
        for commit in commits:
            commit.state.chain = NOTHING

    def forget(self, state: RequestState) -> None:
        """Nothing is held."""


class GuesserDrafts:
    """Drafts of a model-free speculator, asked at the moment they are needed."""

    def __init__(self, guesser: Guesser) -> None:
        self._guesser = guesser
        self._known: set[int] = set()

    def begin(self, rows: list[TargetRow]) -> bool:
        """Put each due row's guess into its chain."""
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
        state.chain = Chain(tokens) if tokens else NOTHING

    def ahead(self, rows: list[CheckedRow], now_s: float) -> None:
        """Guesses cost nothing at the moment they are needed."""

    def settled(self, now_s: float) -> None:
        """Nothing was drafted ahead."""

    def tidy(self) -> None:
        """Nothing was put off."""

    def committed(self, commits: Sequence[Commit]) -> None:
        """Guesses look at all committed tokens."""
        for commit in commits:
            state = commit.state
            state.chain = NOTHING
            if state.row in self._known:
                self._guesser.extend(state.row, commit.tokens)

    def forget(self, state: RequestState) -> None:
        """Close the row; a preempted request is opened anew."""
        state.chain = NOTHING
        if state.row in self._known:
            self._known.discard(state.row)
            self._guesser.close(state.row)
