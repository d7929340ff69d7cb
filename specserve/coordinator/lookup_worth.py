"""Whether to take what followed an earlier match instead of what a draft model says, by how often each was kept."""

from __future__ import annotations

from specserve.types import SourceName

_LONGEST = 8
"""Matches of this length and longer count as alike."""

_WEIGHT = 1 / 32
"""Of one round of one request in the running means."""

_MODEL_AT_FIRST, _MATCH_AT_FIRST = 1.0, 0.25
"""Tokens held to be kept of a model's draft, and behind a match for each of its tokens, before any was seen."""

_TRIED_EVERY = 32
"""Of so many times that one side loses it is taken once: what it is worth may have changed."""


class LookupWorth:
    """Running means of the tokens kept in a round: of the model's drafts, and behind matches, by their length.

    What it decides depends on lengths and means only, never on a drafted token: so a model's drafts keep their law.
    """

    def __init__(self, source: SourceName) -> None:
        self.source = source
        self._model = _MODEL_AT_FIRST
        self._matches = [_MATCH_AT_FIRST * length for length in range(_LONGEST + 1)]
        self._lost = [0] * (_LONGEST + 1)
        self._model_lost = 0

    def better(self, matched: int) -> bool:
        """Whether a match of so many tokens is to be taken, where a model could draft as well."""
        length = min(matched, _LONGEST)
        if self._matches[length] > self._model:
            self._model_lost += 1
            return self._model_lost % _TRIED_EVERY != 0
        self._lost[length] += 1
        return self._lost[length] % _TRIED_EVERY == 0

    def drafted(self, kept: int) -> None:
        """The model was asked, and so many tokens of what it had in time were kept."""
        self._model += _WEIGHT * (kept - self._model)

    def looked_up(self, matched: int, kept: int) -> None:
        """A match of so many tokens was taken, and so many of those behind it were kept."""
        length = min(matched, _LONGEST)
        self._matches[length] += _WEIGHT * (kept - self._matches[length])
