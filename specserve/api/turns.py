"""When those come back for whom there was no room: one after the other, as places become free, and not all at once.

Clients that are all told the same second make every second of it a storm, in which the answers under way stand still.
So each is given a turn of its own, behind those given before; turns follow each other as fast as answers end here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

LONGEST_S: Final = 60.0
"""Nobody is sent away for longer: clients of OpenAI take no longer wait for their own than this."""

_SHORTEST_S: Final = 1.0
_FIRST_GUESS_S: Final = 5.0
_WEIGHT: Final = 0.1
_EAGER: Final = 1.5
"""Turns by the end of an answer: who was sent away may not come back, and a free place should not wait for anybody."""


class Turns:
    """Told how long answers take. places are those of the engine, waiting ones included; clock gives seconds."""

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._clock = clock
        self._answer_s = _FIRST_GUESS_S
        self._last_s = -math.inf

    def ended(self, seconds: float) -> None:
        """An answer came to its end after so long."""
        self._answer_s += _WEIGHT * (seconds - self._answer_s)

    def next_s(self, running: int) -> float:
        """Seconds until the turn of one more, while so many requests are under way, those yet to be refused too."""
        now_s = self._clock()
        between_s = self._answer_s / (_EAGER * max(1, min(running, self._places)))
        self._last_s = max(self._last_s + between_s, now_s + _SHORTEST_S)
        if self._last_s > now_s + LONGEST_S:  # rather between the others than all at the end
            self._last_s = now_s + _SHORTEST_S
        return self._last_s - now_s
