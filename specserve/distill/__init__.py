"""Training a draft for a target: text that the target writes, students that share its embedding and head."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Who is told how far it is."""

    def say(self, line: str) -> None:
        """Something worth a line."""
        ...

    def advance(self, stage: str, done: int, total: int) -> None:
        """So much of a stage is done. Called often."""
        ...
