"""Predicted outputs: the text that a client expects is the draft of the answer (OpenAI's `prediction`).

A cursor walks along the prediction while the answer agrees with it. Where the answer departs, the cursor is found again
by the longest run of answer tokens, SPAN at most, that the prediction holds: nearest ahead of the last agreement, else
nearest behind it. A run of one token counts only a little ahead, where a replaced word most likely ends. The first few
tokens of an answer may stand before what was predicted, so until then its beginning stays the guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from specserve.config import DraftConfig
from specserve.drafting import Kind

KIND: Final[Kind] = "guesser"

SPAN: Final = 6
"""Tokens of the longest run that is looked up; of two places the one with the longer run is right more often."""

REACH: Final = 16
"""How far ahead, in tokens, a single token may find the cursor."""

OPENING: Final = 2
"""Tokens of an answer after which its beginning is no longer expected."""


def build(config: DraftConfig) -> PredictionGuesser:
    """The guesser; nothing of it is configurable."""
    return PredictionGuesser()


class PredictionGuesser:
    """A `Guesser` that knows only what a client predicted: rows opened without a prediction get no guesses."""

    def __init__(self) -> None:
        self._rows: dict[int, _Walk] = {}

    def open(self, row: int, tokens: Sequence[int], prompt_length: int = 0, prediction: Sequence[int] = ()) -> None:
        """Start, or start again, at the end of the committed tokens of a row."""
        walk = self._rows[row] = _Walk(prediction)
        walk.follow(tokens[prompt_length:])

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The row has more committed tokens."""
        self._rows[row].follow(tokens)

    def guess(self, row: int, depth: int) -> list[int]:
        """At most `depth` tokens that the prediction holds behind the cursor; none where the answer departed."""
        return self._rows[row].ahead(depth)

    def close(self, row: int) -> None:
        """Forget the row, if it is known."""
        self._rows.pop(row, None)


class _Walk:
    """One answer along one prediction. `at` is the place that comes next, None while the answer has departed."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = list(prediction)
        self._behind: dict[int, list[int]] = {}  # the places behind each token's occurrences
        for place, token in enumerate(self._prediction, start=1):
            self._behind.setdefault(token, []).append(place)
        self._length = 0  # of the answer
        self._recent: list[int] = []  # its last tokens, SPAN at most
        self._at: int | None = 0
        self._agreed = 0  # the place behind the last agreement

    def follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._length += 1
            self._recent = [*self._recent, token][-SPAN:]
            agrees = self._at is not None and self._prediction[self._at : self._at + 1] == [token]
            self._at = self._at + 1 if agrees and self._at is not None else self._found()
            if self._at is not None:
                self._agreed = self._at

    def ahead(self, depth: int) -> list[int]:
        return [] if self._at is None else self._prediction[self._at : self._at + depth]

    def _found(self) -> int | None:
        places = self._behind.get(self._recent[-1], [])
        best = max(places, key=self._likeness, default=0)
        if self._run(best) > 1 or (best > 0 and 0 < best - self._agreed <= REACH):
            return best
        return 0 if self._agreed == 0 and self._length <= OPENING else None

    def _likeness(self, place: int) -> tuple[int, bool, int]:
        return (self._run(place), place > self._agreed, -abs(place - self._agreed))

    def _run(self, place: int) -> int:
        """How many of the recent tokens, from the last one back, stand before this place too."""
        length = 0
        for known, token in zip(
            reversed(self._recent), reversed(self._prediction[max(0, place - SPAN) : place]), strict=False
        ):
            if known != token:
                break
            length += 1
        return length
