"""Who is told how far a run is."""

from __future__ import annotations

import math


class Listener:
    """A `Progress` that remembers, and stops the run after so many lines."""

    def __init__(self, lines: float = math.inf) -> None:
        self.lines: list[str] = []
        self.stages: dict[str, tuple[int, int]] = {}
        self._left = lines

    def say(self, line: str) -> None:
        self.lines.append(line)
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt

    def advance(self, stage: str, done: int, total: int) -> None:
        assert done <= total
        assert done >= self.stages.get(stage, (0, 0))[0]
        self.stages[stage] = done, total
