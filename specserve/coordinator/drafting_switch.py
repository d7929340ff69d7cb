"""Whether drafts are made at all: on or off, with trials of the other state now and then.

A trial loses what its rounds take more than those of the state that it interrupts. All trials of a state share an
account: each round in it pays a small part of a round in, each trial takes out what it lost, and none begins below
zero. So what loses little, because it is close to even, is tried often. Each state has its own: plain rounds lose much
where drafts pay, and that is no reason not to try drafts where they did not. (A bandit with switching costs, as
Nightjar, 2025, has it, with two arms.)
"""

from __future__ import annotations

_WINDOW, _OFF_WINDOW = 8, 64
"""Rounds after a look at whether drafting pays: while on, and while off with as many requests, where little changes."""

_CLEAR, _LOST = 1.05, 1.0
"""The gain over plain decoding from which on drafting is turned on, and below which it is turned off."""

_OFF_SHARE, _ON_SHARE = 0.007, 0.02
"""Rounds that one round pays in: while drafting is off, so that it costs no more; while on, from what it gains."""

_SAVED = 1.5
"""The most that there is in the account."""

_LENT = 6.0
"""The most that there is too little."""

_OWED = 1.5
"""What a trial may owe for what was lost behind it: drafts that come in time again are not to wait for too long."""

_APART, _NEW_APART = 24, 4
"""Rounds between two trials, at least, and where a request came meanwhile."""

_PLAIN_APART = 64
"""Rounds with drafts after which plain ones are tried even with an empty account: what trials of sizes took from it
must not keep drafting on where it loses."""

_WAKE = 1
"""Rounds after a trial that are charged to it."""

_PLAIN_TRIAL = 4
"""Rounds of a trial of plain decoding."""


class DraftingSwitch:
    """Off at first, until a trial that comes soon.

    trial_rounds: of a trial of drafting. probation_rounds: so long after one turned drafting on, what is lost is
    charged to it, which promised more.
    """

    def __init__(self, trial_rounds: int, probation_rounds: int = 0) -> None:
        self.on = False
        self.trial_left = 0
        self._trial_rounds = trial_rounds
        self._since_trial = _APART - _PLAIN_TRIAL
        self._accounts = {True: _SAVED, False: _SAVED}  # of trials while on, and while off
        self._since_look = 0
        self._probation_rounds = probation_rounds
        self._probation_left = 0

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
        self._since_look += 1
        self._probation_left = max(0, self._probation_left - 1)
        share = _ON_SHARE if self.on else _OFF_SHARE
        self._accounts[self.on] = min(_SAVED, self._accounts[self.on] + share)
        if self.trial_left == 0:
            self._since_trial += 1
            due = self._since_look >= (_WINDOW if self.on else _OFF_WINDOW)
            self._since_look = 0 if due else self._since_look
            return due
        self.trial_left -= 1
        if self.trial_left == 0:
            self._since_trial = 0
        return self.trial_left == 0

    def look(self, gain: float) -> None:
        """Drafting is `gain` times as fast as plain decoding, as far as is known. Not in a trial."""
        self._since_look, was_on = 0, self.on
        self.on = gain >= _LOST if self.on else gain > _CLEAR
        if self.on and not was_on:
            self._probation_left = self._probation_rounds

    @property
    def may_lose(self) -> bool:
        """There is something in the account."""
        return self._accounts[self.on] > 0

    def consider_trial(self, wanted: bool, new: bool) -> bool:
        """Begin a trial with this round if it is wanted and can be paid for, and say so.

        new: there is something new, so that the last trial says less.
        """
        apart = self._since_trial >= (_NEW_APART if new else _APART)
        paid = self.may_lose or (self.on and self._since_trial >= _PLAIN_APART)
        if self.trial_left or not (wanted and apart and paid):
            return False
        self.trial_left = _PLAIN_TRIAL if self.on else self._trial_rounds
        return True

    @property
    def charging(self) -> bool:
        """This round is part of a trial, on probation, or in a trial's wake, which does what was left undone."""
        return self.trial_left > 0 or self._since_trial < _WAKE or self.on_probation

    @property
    def on_probation(self) -> bool:
        """On, and not long enough to trust what turned it on. Not in a trial of plain decoding."""
        return self.on and self._probation_left > 0 and self.trial_left == 0

    @property
    def proven(self) -> bool:
        """On, and no longer on probation: what is lost is lost against drafting."""
        return self.on and not self.on_probation

    def charge(self, plain_rounds: float) -> None:
        """A round that is charged lost so much, in rounds of plain decoding; what it gained is negative."""
        left = self._accounts[self.proven]
        least = min(left, -_OWED) if self.on_probation else -_LENT
        self._accounts[self.proven] = max(least, min(_SAVED, left - plain_rounds))
