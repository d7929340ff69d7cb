"""A row's own tokens on a worker, by absolute position, and how often each occurs.

A worker hears of committed tokens in three ways: from `Open`, from what it is fed, and from its own chains that were
kept. All three are statements about absolute positions, exactly as for KV: what is written from `start` on voids
everything that was known past it. So the tokens before a row's start are the committed ones, whatever was refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from specserve.errors import ProtocolError
from specserve.transport.messages import Array


class History:
    """Prompt and answer of one row. The prompt never changes; the answer is rewritten by position."""

    def __init__(self, tokens: Array, prompt_length: int) -> None:
        self.prompt = tokens[:prompt_length].tolist()
        self._answer: list[int] = tokens[prompt_length:].tolist()
        self._uncounted = Counter(self._answer)
        self._counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self._answer)

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """These tokens stand from absolute position `start` on, and nothing after them is known any more.

        Raises ProtocolError when the tokens before `start` are not known.
        """
        if start > len(self):
            raise ProtocolError(f"a row that continues at position {start}, but only {len(self)} tokens are known")
        keep = max(0, start - len(self.prompt))
        new = list(tokens[max(0, len(self.prompt) - start) :])
        self._uncounted.subtract(self._answer[keep:])
        self._uncounted.update(new)
        self._answer[keep:] = new

    def tail(self, length: int) -> list[int]:
        """The last `length` tokens of the answer, or all that there are."""
        return self._answer[-length:] if length else []

    def counts(self, width: int, device: torch.device) -> torch.Tensor:
        """float32 [width]: how often each id stands in the answer. Changed by the next call; not to be written to."""
        if self._counts is None:
            self._counts = torch.zeros(width, device=device)
        changed = {token: by for token, by in self._uncounted.items() if by and token < width}
        self._uncounted.clear()
        if changed:
            ids = torch.tensor(list(changed), device=device)
            self._counts.index_add_(0, ids, torch.tensor(list(changed.values()), dtype=torch.float32, device=device))
        return self._counts

    def in_prompt(self, width: int, device: torch.device) -> torch.Tensor:
        """bool [width]: whether each id stands in the prompt."""
        if self._in_prompt is None:
            ids = torch.tensor([token for token in set(self.prompt) if token < width], dtype=torch.int64)
            self._in_prompt = torch.zeros(width, dtype=torch.bool)
            self._in_prompt[ids] = True
            self._in_prompt = self._in_prompt.to(device)
        return self._in_prompt
