"""Drafts of a request's own: from the speculator that it named, or from the answer that its client predicted.

They come before the deployment's drafts and need no worker. Where a prediction has nothing to say, the deployment's
speculator drafts as for any other request; a request that named its source gets drafts from nowhere else.

A deployment with a draft model may look tokens up besides (`draft.lookup`): where what follows a match was kept more
often than the model's drafts, and where there is no draft worker now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from specserve.coordinator.chain import NOTHING, Chain
from specserve.coordinator.commits import Commit
from specserve.coordinator.guess_chances import GuessChances
from specserve.coordinator.lookup_worth import LookupWorth
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


@runtime_checkable
class LooksUp(RequestGuesser, Protocol):
    """One that says how much it goes by."""

    def look_up(self, row: int, depth: int) -> tuple[int, list[int]]:
        """The guess, and before it the length of the match that it followed, in tokens; 0 without one."""
        ...


class OwnDrafts:
    """The model-free speculators by name, and which requests have them open. `speculator` is the deployment's.

    slots are those that chains of the deployment's speculator hold. lookup is given where a guesser is used beside it.
    """

    def __init__(
        self,
        guessers: Mapping[SourceName, LooksUp],
        speculator: SourceName,
        slots: SlotPool,
        lookup: LookupWorth | None = None,
    ) -> None:
        self._slots = slots
        self._guessers = guessers
        self._speculator = speculator
        self._open: dict[int, dict[SourceName, LooksUp]] = {}
        self._lookup = lookup
        self._chances = GuessChances()
        self._guessed: dict[int, tuple[SourceName, int]] = {}  # by row, whose guess it has, and how long a match was
        self._drafted: set[int] = set()  # rows that were left to the deployment's speculator, where one looks up, too

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

    def begin(self, rows: Sequence[TargetRow], *, alone: bool = False) -> list[TargetRow]:
        """Put their own guesses into the chains of rows that have any; returns the rows that others may draft for.

        alone: there is nobody else who drafts.
        """
        left = [row for row in rows if not self._guess(row, alone)]
        if self._lookup is not None:
            self._drafted = set() if alone else {row.state.row for row in left if row.depth}
        return left

    def _guess(self, row: TargetRow, alone: bool) -> bool:
        """Whether the row has been seen to, with a guess or with none."""
        state = row.state
        if state.guessed_by is not None and not state.chain.held:  # of a round without a verdict: nobody else's draft
            state.chain = NOTHING
        state.guessed_by = None
        if self._guessed:
            self._guessed.pop(state.row, None)
        request = state.request
        named = request.source is not None
        source = self._source(request) if named or request.prediction else None
        if source is None or row.depth == 0:
            return source is not None if named else self._look_up(row, alone)
        guess = self._opened(state, source).guess(state.row, row.guessed + 1)
        if not guess and not named:
            return self._look_up(row, alone)
        self._offer(row, source, guess, 0)
        state.predicted = guess if source == PREDICTION else []
        return True

    def _look_up(self, row: TargetRow, alone: bool) -> bool:
        state, lookup = row.state, self._lookup
        if lookup is None or row.depth == 0:
            return False
        matched, guess = self._opened(state, lookup.source).look_up(state.row, row.guessed)
        if not guess or not (alone or lookup.better(matched)):
            return False
        self._offer(row, lookup.source, guess, matched)
        return True

    def _offer(self, row: TargetRow, source: SourceName, guess: list[int], matched: int) -> None:
        state, tokens = row.state, guess[: row.guessed]
        self._slots.free(state.chain.held)
        sureness = [self._chances.of(source, matched)] * len(tokens)
        state.chain = Chain(tokens, sureness=sureness) if tokens else NOTHING
        row.depth = len(tokens)
        self._guessed[state.row] = source, matched
        state.guessed_by = source
        state.predicted = []

    def _source(self, request: Request) -> SourceName | None:
        """The guesser that this request has for itself, if it has one."""
        if request.source is not None:
            return request.source if request.source in self._guessers else None
        return PREDICTION if request.prediction and PREDICTION in self._guessers else None

    def _opened(self, state: RequestState, source: SourceName) -> LooksUp:
        opened = self._open.setdefault(state.row, {})
        guesser = opened.get(source)
        if guesser is None:
            guesser = opened[source] = self._guessers[source]
            guesser.open(state.row, state.tokens, len(state.request.prompt), state.request.prediction)
        return guesser

    def committed(self, commits: Sequence[Commit]) -> None:
        """These tokens were just appended to their requests."""
        if not self._open and self._lookup is None:
            return
        for commit in commits:
            row = commit.state.row
            for guesser in self._open.get(row, {}).values():
                guesser.extend(row, commit.tokens)
            source, matched = self._guessed.get(row, (None, 0))
            if source is not None:
                self._chances.observe(source, matched, commit.offered, commit.kept)
            if self._lookup is None:
                continue
            if source == self._lookup.source and matched:
                if commit.offered:  # it may have been cut to nothing
                    self._lookup.looked_up(matched, commit.kept)
            elif row in self._drafted:
                self._lookup.drafted(commit.kept)

    def forget(self, state: RequestState) -> None:
        """The request ended or was preempted; a preempted one is opened anew."""
        self._guessed.pop(state.row, None)
        for guesser in self._open.pop(state.row, {}).values():
            guesser.close(state.row)
