"""How much of the time the draft reads prompts, where rounds wait for it: a price of drafting that no round shows.

While nothing is drafted the draft reads nothing, so what a prompt costs it is learned while drafting, and how many come
is counted always.
"""

from __future__ import annotations

_KEPT = 0.995
"""Of each sum, from round to round."""

_FORGOTTEN = 0.998
"""Of what reading took, from round to round without drafts: what was measured in a bad hour must not last."""

_LEAST_TOKENS = 200
"""Prompt tokens that were read before what one takes is believed."""


class PromptReading:
    """Sums that fade."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0  # of all rounds, and of prompts that came in them
        self._read_s = self._read_tokens = 0.0  # likewise while drafting: beyond what drafts alone would have taken

    def observe(self, seconds: float, prompt_tokens: int) -> None:
        """A round took so long and fed the target so much of prompts."""
        self._seconds = _KEPT * self._seconds + seconds
        self._tokens = _KEPT * self._tokens + prompt_tokens
        self._read_s *= _FORGOTTEN

    def observe_draft(self, beyond_s: float, prompt_tokens: int) -> None:
        """While drafting, a round waited for its drafts so much longer than drafts of their size take."""
        self._read_s = _KEPT / _FORGOTTEN * self._read_s + beyond_s
        self._read_tokens = _KEPT * self._read_tokens + prompt_tokens

    @property
    def share(self) -> float:
        """Seconds of each second that the draft would read prompts, at most a half."""
        if self._read_tokens < _LEAST_TOKENS or not self._seconds:
            return 0.0
        each_s = max(0.0, self._read_s) / self._read_tokens
        return min(0.5, each_s * self._tokens / self._seconds)
