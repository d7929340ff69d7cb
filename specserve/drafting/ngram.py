"""Prompt lookup: what followed the last time these tokens occurred (Saxena, "Prompt lookup decoding", 2023).

The longest suffix of the history, of ngram_max down to ngram_min tokens, that occurred before decides; among several
occurrences the most recent one. The index grows with the history, so a guess costs the same at any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from specserve.config import DraftConfig
from specserve.drafting import Kind

KIND: Final[Kind] = "guesser"


def build(config: DraftConfig) -> NgramGuesser:
    """The guesser for a configuration."""
    return NgramGuesser(config.ngram_min, config.ngram_max)


class _History:
    """One row's tokens, and where what follows each n-gram begins, by its most recent occurrence.

    An n-gram enters the index only when a token follows it, so the history's own suffix never finds itself.
    """

    def __init__(self, sizes: range) -> None:
        self.tokens: list[int] = []
        self._sizes = sizes
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        begin = len(self.tokens)
        self.tokens.extend(tokens)
        for end in range(max(1, begin), len(self.tokens)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(self.tokens[end - size : end])] = end

    def look_up(self, depth: int) -> tuple[int, list[int]]:
        for size in self._sizes:
            if size < len(self.tokens):
                found = self._after.get(tuple(self.tokens[-size:]))
                if found is not None:
                    return size, self.tokens[found : found + depth]
        return 0, []


class NgramGuesser:
    """A `Guesser`. Guesses never hold a token that the row's history does not hold."""

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._sizes = range(ngram_max, ngram_min - 1, -1)
        self._rows: dict[int, _History] = {}

    def open(self, row: int, tokens: Sequence[int], prompt_length: int = 0, prediction: Sequence[int] = ()) -> None:
        """Start, or start again, with the committed tokens of a row; prompt and answer are one history."""
        history = self._rows[row] = _History(self._sizes)
        history.extend(tokens)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The row has more committed tokens."""
        self._rows[row].extend(tokens)

    def guess(self, row: int, depth: int) -> list[int]:
        """At most `depth` tokens that followed the longest known suffix; fewer where the history ends."""
        return self.look_up(row, depth)[1]

    def look_up(self, row: int, depth: int) -> tuple[int, list[int]]:
        """The guess, and before it the length of the suffix that it followed, in tokens; 0 without one."""
        return self._rows[row].look_up(depth)

    def close(self, row: int) -> None:
        """Forget the row, if it is known."""
        self._rows.pop(row, None)
