"""How often guessed tokens are kept, by who guessed them and how long the text was that they followed before."""

from __future__ import annotations

from specserve.types import SourceName

_LONGEST = 8
"""Matches of this length and longer count as alike."""

_FIRST, _PRIOR = 0.5, 4.0
"""What is held of a token before any was seen, and how many observations that counts for."""

_FADE = 1 - 1 / 64
"""Of what was seen, with each guess more."""


class GuessChances:
    """Shares of guessed tokens that were kept where those before them were; what was seen long ago fades.

    It fades with guesses of which nothing was offered, too: so what was thought worthless is tried again some time.

    They depend on committed text alone, never on a token that is guessed.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[SourceName, int], tuple[float, float]] = {}  # tried, and kept

    def of(self, source: SourceName, matched: int) -> float:
        """Of each token behind a match of so many; 0 where the source does not say how many."""
        tried, kept = self._seen.get((source, min(matched, _LONGEST)), (0.0, 0.0))
        return (kept + _FIRST * _PRIOR) / (tried + _PRIOR)

    def observe(self, source: SourceName, matched: int, offered: int, kept: int) -> None:
        """Of a guess so many tokens were offered and kept."""
        key = source, min(matched, _LONGEST)
        tried, good = self._seen.get(key, (0.0, 0.0))
        self._seen[key] = _FADE * tried + min(kept + 1, offered), _FADE * good + min(kept, offered)
