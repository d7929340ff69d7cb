"""Drafts of a request's own: from the speculator that it named, or from the answer that its client predicted.

They come before the deployment's drafts and need no worker. Where a prediction has nothing to say, the deployment's
speculator drafts as for any other request; a request that named its source gets drafts from nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from specserve.coordinator.chain import NOTHING, Chain
from specserve.coordinator.commits import Commit
from specserve.coordinator.requests import RequestState
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.slots import SlotPool
from specserve.errors import InvalidField
from specserve.types import Request, SourceName

PREDICTION: SourceName = "prediction"
"""The source of drafts from what a client predicted."""


class RequestGuesser(Protocol):
    """A model-free speculator, as requests of their own use it. Rows that are not open raise KeyError."""

    def open(self, row: int, tokens: Sequence[int], prompt_length: int, prediction: Sequence[int]) -> None:
        """Start, or start again, with the committed tokens of a row; the first prompt_length are the prompt."""
        ...

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The row has more committed tokens."""
        ...

    def guess(self, row: int, depth: int) -> list[int]:
        """At most `depth` tokens that may follow; empty when there is nothing to say."""
        ...

    def close(self, row: int) -> None:
        """Forget the row, if it is known."""
        ...


class OwnDrafts:
    """The model-free speculators by name, and which requests have one open. `speculator` is the deployment's.

    slots are those that chains of the deployment's speculator hold.
    """

    def __init__(self, guessers: Mapping[SourceName, RequestGuesser], speculator: SourceName, slots: SlotPool) -> None:
        self._slots = slots
        self._guessers = guessers
        self._speculator = speculator
        self._open: dict[int, RequestGuesser] = {}

    def check(self, request: Request) -> None:
        """Raise InvalidField for a source that is not there, or that has nothing to draft from."""
        if request.source not in (None, self._speculator, *self._guessers):
            known = ", ".join(sorted({self._speculator, *self._guessers}))
            raise InvalidField(
                f"no speculator called {request.source!r} here; there are: {known}", param="speculation.source"
            )
        if request.source == PREDICTION and not request.prediction:
            raise InvalidField(
                "speculation.source is prediction, but the request has no prediction", param="speculation.source"
            )

    def begin(self, rows: Sequence[TargetRow]) -> list[TargetRow]:
        """Put their own guesses into the chains of rows that have any; returns the rows that others may draft for."""
        return [row for row in rows if not self._guess(row)]

    def _guess(self, row: TargetRow) -> bool:
        """Whether the row has been seen to, with a guess or with none."""
        state = row.state
        state.guessed_by = None
        source = self._source(state.request)
        if source is None:
            return False
        if row.depth == 0:
            return state.request.source is not None
        guess = self._opened(state, source).guess(state.row, row.depth + 1)
        if not guess and state.request.source is None:
            return False
        self._slots.free(state.chain.held)
        state.chain = Chain(guess[: row.depth]) if guess else NOTHING
        row.depth = min(row.depth, len(guess))
        state.guessed_by = source
        state.predicted = guess if source == PREDICTION else []
        return True

    def _source(self, request: Request) -> SourceName | None:
        """The guesser that this request has for itself, if it has one."""
        if request.source is not None:
            return request.source if request.source in self._guessers else None
        return PREDICTION if request.prediction and PREDICTION in self._guessers else None

    def _opened(self, state: RequestState, source: SourceName) -> RequestGuesser:
        guesser = self._open.get(state.row)
        if guesser is None:
            guesser = self._open[state.row] = self._guessers[source]
            guesser.open(state.row, state.tokens, len(state.request.prompt), state.request.prediction)
        return guesser

    def committed(self, commits: Sequence[Commit]) -> None:
        """These tokens were just appended to their requests."""
        for commit in commits:
            guesser = self._open.get(commit.state.row)
            if guesser is not None:
                guesser.extend(commit.state.row, commit.tokens)

    def forget(self, state: RequestState) -> None:
        """The request ended or was preempted; a preempted one is opened anew."""
        guesser = self._open.pop(state.row, None)
        if guesser is not None:
            guesser.close(state.row)
