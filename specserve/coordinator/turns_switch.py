"""Whether draft and target work at the same time or in turns, by what each way was measured to bring.

To work at once is the faster way for a draft that keeps pace. One that does not, because several pipelines share it or
because many outcomes of many requests cost more than there is time for, comes too late for every verdict; then a round
that waits for its draft makes more. Which is so cannot be foreseen, so the other way is tried for some rounds, and kept
where it was faster. A trial that failed makes the next one wait twice as long. (A bandit with switching costs, with two
arms, as in `drafting_switch`.)
"""

from __future__ import annotations

_SHORTEST, _LONGEST = 64, 8192
"""Rounds between two trials: after one that succeeded, and at most."""

_SETTLING = 3
"""Rounds after a change that tell nothing: what the other way left is still about."""

_TRIAL_ROUNDS, _TRIAL_TOKENS = 24, 384
"""A trial has so many rounds and tokens at least: at one token and a half more or less per round, 5 % of its mean."""

_TRIAL_AT_MOST = 256
"""Rounds after which a trial is over, also such that tell nothing: it is judged by the others, if there are any."""

_CLEARLY = 1.33
"""A way that is so many times as fast as the other, or as slow, needs no tokens beyond those rounds."""

_WEIGHT = 1 / 64
"""Of a round in the running means."""

_WORTH_A_TRIAL = 1.1
"""How many times as many tokens the draft must promise in turns, before that is tried."""


class _Rate:
    """Tokens per request and second, of the newest rounds."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self.rounds = 0
        self.seen = 0

    def observe(self, tokens: int, row_seconds: float) -> None:
        fade = 1 - _WEIGHT
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + row_seconds
        self.rounds += 1
        self.seen += tokens

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0


class TurnsSwitch:
    """At once at first."""

    def __init__(self) -> None:
        self.in_turns = False
        self._rate = _Rate()
        self._settling = _SETTLING
        self._gap = _SHORTEST
        self._trial_rounds = 0  # of all kinds
        self._to_beat: float | None = None  # what the other way brought before this trial of the present one

    def observe(self, tokens: int, rows: int, seconds: float, promised: float | None) -> None:
        """A round of the present way made so many tokens for so many requests, and took this long.

        promised: tokens per request and second that are expected of taking turns; None while nothing is known.
        """
        if self._settling:
            self._settling -= 1
            return
        self._rate.observe(tokens, rows * seconds)
        if self._to_beat is not None:
            if self._rate.rounds >= _TRIAL_ROUNDS and (self._rate.seen >= _TRIAL_TOKENS or self._clear(self._to_beat)):
                self._judge(self._to_beat)
        elif self._rate.rounds >= self._gap and self._worth_trying(promised):
            self._change(to_beat=self._rate.value)

    def passed(self) -> None:
        """A round is over, whether it told anything or not."""
        if self._to_beat is not None:
            self._trial_rounds += 1
            if self._trial_rounds >= _TRIAL_AT_MOST:
                self._judge(self._to_beat)

    def _worth_trying(self, promised: float | None) -> bool:
        """What working at once would bring while they take turns can only be tried."""
        return self.in_turns or (promised is not None and promised > _WORTH_A_TRIAL * self._rate.value)

    def _clear(self, to_beat: float) -> bool:
        return not to_beat / _CLEARLY < self._rate.value < to_beat * _CLEARLY

    def _judge(self, to_beat: float) -> None:
        self._to_beat = None
        if self._rate.value > to_beat:
            self._gap = _SHORTEST
            self._rate = _Rate()
        else:
            self._gap = min(_LONGEST, 2 * self._gap)
            self._change(to_beat=None)

    def _change(self, to_beat: float | None) -> None:
        self.in_turns = not self.in_turns
        self._to_beat = to_beat
        self._trial_rounds = 0
        self._rate = _Rate()
        self._settling = _SETTLING
