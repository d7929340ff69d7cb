"""A row's own tokens on a worker, by absolute position, and how often each occurs.

A worker hears of committed tokens in three ways: from `Open`, from what it is fed, and from its own chains that were
kept. All three are statements about absolute positions, exactly as for KV: what is written from `start` on voids
everything that was known past it. So the tokens before a row's start are the committed ones, whatever was refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.errors import ProtocolError
from specserve.transport.messages import Array


class History:
    """Prompt and answer of one row. The prompt never changes; the answer is rewritten by position.

    counts says how often each token stands in the answer; it holds the tokens of prompt and answer and no others.
    """

    def __init__(self, tokens: Array, prompt_length: int) -> None:
        self.prompt: list[int] = tokens[:prompt_length].tolist()
        self.counts = dict.fromkeys(self.prompt, 0)
        self._in_prompt = frozenset(self.prompt)
        self._answer: list[int] = []
        self._occurrences: tuple[Array, Array] | None = None
        self.write(prompt_length, tokens[prompt_length:].tolist())

    def __len__(self) -> int:
        return len(self.prompt) + len(self._answer)

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """These tokens stand from absolute position `start` on, and nothing after them is known any more.

        Raises ProtocolError when the tokens before `start` are not known.
        """
        if start > len(self):
            raise ProtocolError(f"a row that continues at position {start}, but only {len(self)} tokens are known")
        keep = max(0, start - len(self.prompt))
        for token in self._answer[keep:]:
            self._count(token, -1)
        new = tokens[max(0, len(self.prompt) - start) :]
        for token in new:
            self._count(token, 1)
        self._answer[keep:] = new
        self._occurrences = None

    def _count(self, token: int, by: int) -> None:
        count = self.counts.get(token, 0) + by
        if count or token in self._in_prompt:
            self.counts[token] = count
        else:
            del self.counts[token]

    def tail(self, length: int) -> list[int]:
        """The last `length` tokens of the answer, or all that there are."""
        return self._answer[-length:] if length else []

    def occurrences(self) -> tuple[Array, Array]:
        """`counts` as columns: ids int64 [n], and how often each stands in the answer, float32 [n]."""
        if self._occurrences is None:
            size = len(self.counts)
            self._occurrences = (
                np.fromiter(self.counts.keys(), dtype=np.int64, count=size),
                np.fromiter(self.counts.values(), dtype=np.float32, count=size),
            )
        return self._occurrences
