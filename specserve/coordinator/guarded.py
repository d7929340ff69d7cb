"""A model-free speculator behind a guard: it may be anybody's code, and runs in the coordinator itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from specserve.coordinator.drafts import Guesser
from specserve.coordinator.own_drafts import LooksUp, RequestGuesser
from specserve.errors import ProtocolError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Guarded:
    """Costs the row at which its speculator raised, or guessed what is no token, its guesses, and nobody anything.

    Tokens are copied for it: what it does to a list that it was given, or keeps, must not change a request's text.
    """

    def __init__(self, guesser: Guesser | RequestGuesser, vocab_size: int) -> None:
        self._guesser = guesser
        self._looks_up = guesser if isinstance(guesser, LooksUp) else None
        self._open: Callable[..., None] = guesser.open
        self._vocab_size = vocab_size
        self._failed: set[int] = set()

    def open(self, row: int, tokens: Sequence[int], *about: Any) -> None:
        """See `Guesser` and `RequestGuesser`. `about` is the prompt's length and the request's prediction, a tuple."""
        self._failed.discard(row)
        self._tried(row, None, lambda: self._open(row, list(tokens), *about))

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """See `Guesser`."""
        self._tried(row, None, lambda: self._guesser.extend(row, list(tokens)))

    def guess(self, row: int, depth: int) -> list[int]:
        """See `Guesser`."""
        return self._tried(row, [], lambda: self._checked(self._guesser.guess(row, depth)))

    def look_up(self, row: int, depth: int) -> tuple[int, list[int]]:
        """See `LooksUp`; (0, []) from what is none."""

        def looked_up() -> tuple[int, list[int]]:
            if self._looks_up is None:
                return 0, []
            matched, tokens = self._looks_up.look_up(row, depth)
            if int(matched) < 0:
                raise ProtocolError(f"found a match of {matched} tokens")
            return int(matched), self._checked(tokens)

        nothing: tuple[int, list[int]] = (0, [])
        return self._tried(row, nothing, looked_up)

    def close(self, row: int) -> None:
        """See `Guesser`."""
        self._tried(row, None, lambda: self._guesser.close(row))
        self._failed.discard(row)

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        found = [int(token) for token in tokens]
        if any(not 0 <= token < self._vocab_size for token in found):
            raise ProtocolError(f"guessed {found}, of which one is no token of {self._vocab_size}")
        return found

    def _tried(self, row: int, otherwise: T, call: Callable[[], T]) -> T:
        if row in self._failed:
            return otherwise
        try:
            return call()
        except Exception:
            log.exception("the speculator %s failed; this request goes on without it", type(self._guesser).__name__)
            self._failed.add(row)
            return otherwise
