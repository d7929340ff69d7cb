"""Whether drafts are made at all: on or off, with trials of the other state now and then.

A trial costs what its rounds lose against the state it interrupts, and the next one waits until that is a hundredth of
the time between. To turn on takes a clear gain; to turn off, looks in a row that see none. (A bandit with switching
costs, as Nightjar, 2025, has it, with two arms.)
"""

from __future__ import annotations

_WINDOW = 8
"""Rounds between two looks at whether drafting pays."""

_CLEAR = 1.05
"""The gain over plain decoding from which on drafting is turned on; below 1 it is turned off."""

_PATIENCE = 2
"""Looks in a row that see no gain before drafting is turned off."""

_TRIAL_SHARE = 0.01
"""Of all time, what trials of drafting may lose."""

_SHORTEST, _LONGEST = 32, 512
"""Rounds between two trials, at least, and between two trials of drafting at most."""

_WAKE = 2
"""Rounds after a trial of drafting that are charged to it."""

_PLAIN_TRIAL = 2
"""Rounds of a trial of plain decoding."""

_PLAIN_GAP, _MOST_SURE = 200, 4.0
"""Rounds between two trials of plain decoding where drafting gains nothing; where it gains g, g² times as many, and at
most four times."""


_AFTER_CHANGE = 64
"""Rounds since the last trial after which there is one of drafting where the load is another than at that one."""


class DraftingSwitch:
    """On at first, with a trial of plain decoding as soon as it is asked for. trial_rounds: of a trial of drafting."""

    def __init__(self, trial_rounds: int) -> None:
        self.on = True
        self.trial_left = 0
        self._trial_rounds = trial_rounds
        self._since_trial = _SHORTEST
        self._loss = 0.0
        self._round = 0
        self._in_vain = 0
        self._changed = False

    @property
    def active(self) -> bool:
        """Drafts are made in this round, be it as a trial."""
        return self.on != (self.trial_left > 0)

    @property
    def trying(self) -> bool:
        """Off, but drafts are tried."""
        return self.trial_left > 0 and not self.on

    @property
    def trial_ends(self) -> bool:
        """This round is the last of a trial of drafting: what is drafted beside it will never be checked."""
        return self.trying and self.trial_left == 1

    @property
    def trial_begins(self) -> bool:
        """This round is the first of a trial of drafting."""
        return self.trying and self.trial_left == self._trial_rounds

    def advance(self) -> bool:
        """One more round begins. True when it is time to `look`: from time to time, and when a trial is over."""
        self._round += 1
        if self.trial_left == 0:
            self._since_trial += 1
            return self._round % _WINDOW == 0
        self.trial_left -= 1
        if self.trial_left == 0:
            self._since_trial = 0
        return self.trial_left == 0

    def look(self, gain: float) -> None:
        """Drafting is `gain` times as fast as plain decoding, as far as is known."""
        if not self.on:
            self.on = gain > _CLEAR
            self._in_vain = 0
            return
        self._in_vain = self._in_vain + 1 if gain < 1.0 else 0
        if self._in_vain == _PATIENCE:
            self.on = False
            self._in_vain = self._since_trial = 0
            self._loss = 0.0

    def consider_trial(self, gain: float, plain_known: bool) -> bool:
        """Begin a trial with this round if one is due, and say so."""
        if self.trial_left or self._since_trial < _SHORTEST:
            return False
        if self.on:
            due = not plain_known or self._since_trial >= _PLAIN_GAP * min(_MOST_SURE, max(1.0, gain) ** 2)
        else:
            longest = _AFTER_CHANGE if self._changed else _LONGEST
            due = self._since_trial >= min(longest, self._loss / _TRIAL_SHARE)
        if due:
            self._loss, self._changed = 0.0, False
            self.trial_left = _PLAIN_TRIAL if self.on else self._trial_rounds
        return due

    def load_changed(self) -> None:
        """What trials have shown may be true no more: it was of other numbers of requests."""
        self._changed = True

    @property
    def charging(self) -> bool:
        """This round is part of a trial of drafting, or in its wake: what it left undone is done beside this one."""
        return not self.on and (self.trial_left > 0 or self._since_trial < _WAKE)

    def charge(self, plain_rounds: float) -> None:
        """A round that is charged lost so much, in rounds of plain decoding; what it gained is negative."""
        self._loss += plain_rounds
