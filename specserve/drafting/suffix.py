"""The longest match anywhere in the request or in past answers, by suffix automata (SAM decoding, Hu et al. 2024).

Unlike an n-gram index, an automaton finds the longest suffix of the history that occurred before at whatever length,
in constant amortised time per token. A match of m tokens vouches for at most 2·m more (a bound in the spirit of
suffix decoding, Oliaro et al. 2024), so a chance match of one token costs the verifier little.

Texts of closed rows are kept for all later ones, up to a bound. What they change is how fast an answer comes, never
what it says; where requests must not learn even from speed what others asked, `ngram` is the one to use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from specserve.config import DraftConfig
from specserve.drafting import Kind

KIND: Final[Kind] = "guesser"

PAST_TOKENS = 1 << 16  # of closed rows' texts in each of two generations; roughly 0.5 KiB of memory each

_ROOT = 0
_NO_STATE = -1
_PER_MATCHED = 2


def build(config: DraftConfig) -> SuffixGuesser:
    """The guesser for a configuration."""
    return SuffixGuesser(config.ngram_min, PAST_TOKENS)


class Automaton:
    """The suffix automaton of a text that grows (Blumer et al. 1985), which knows where its states were last met.

    A state stands for the substrings that end at the same places; `lengths` is that of its longest one, `links` the
    state of its longest suffix that ends at more places, `ends` one place just after it. Several texts in one automaton
    are texts between which `begin_text` was called.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.lengths = [0]
        self.links = [_NO_STATE]
        self.ends = [0]
        self.after: list[dict[int, int]] = [{}]
        self.last = _ROOT
        self._text_ends: set[int] = set()

    def begin_text(self) -> None:
        """What is appended from here on does not continue what was."""
        self._text_ends.add(len(self.text))
        self.last = _ROOT

    def append(self, token: int) -> None:
        """The text has one more token."""
        self.text.append(token)
        known = self.after[self.last].get(token)
        if known is not None:  # only at the beginning of a later text, whose prefixes are not new
            self.last = self._split_off(self.last, token, known)
            self.ends[self.last] = len(self.text)
            return
        new = self._state(self.lengths[self.last] + 1, len(self.text), _ROOT, {})
        at = self.last
        while at != _NO_STATE and token not in self.after[at]:
            self.after[at][token] = new
            at = self.links[at]
        if at != _NO_STATE:
            self.links[new] = self._split_off(at, token, self.after[at][token])
        self.last = new

    def following(self, state: int, count: int) -> list[int]:
        """At most `count` tokens that followed the state where it was last met, within one text."""
        begin = end = self.ends[state]
        while end < len(self.text) and end - begin < count and end not in self._text_ends:
            end += 1
        return self.text[begin:end]

    def _split_off(self, at: int, token: int, known: int) -> int:
        """The state of exactly the longest substring of `at` and then `token`; a new one where it shared another's."""
        length = self.lengths[at] + 1
        if self.lengths[known] == length:
            return known
        new = self._state(length, self.ends[known], self.links[known], dict(self.after[known]))
        self.links[known] = new
        while at != _NO_STATE and self.after[at].get(token) == known:
            self.after[at][token] = new
            at = self.links[at]
        return new

    def _state(self, length: int, end: int, link: int, after: dict[int, int]) -> int:
        self.lengths.append(length)
        self.ends.append(end)
        self.links.append(link)
        self.after.append(after)
        return len(self.lengths) - 1


class _Match:
    """The longest suffix of a history that occurs in an automaton's text: its state, and how long it is."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self._state = _ROOT
        self.length = 0

    def advance(self, token: int) -> None:
        """The history has one more token."""
        automaton = self.automaton
        self._settle()
        while self._state != _ROOT and token not in automaton.after[self._state]:
            self._state = automaton.links[self._state]
            self.length = automaton.lengths[self._state]
        found = automaton.after[self._state].get(token)
        if found is not None:
            self._state, self.length = found, self.length + 1

    def following(self, count: int) -> list[int]:
        """What followed there."""
        self._settle()
        return self.automaton.following(self._state, count)

    def _settle(self) -> None:
        """A state that was split since may be longer than what is matched, but not in its suffix."""
        links, lengths = self.automaton.links, self.automaton.lengths
        while self._state != _ROOT and self.length <= lengths[links[self._state]]:
            self._state = links[self._state]


class _Row:
    """One row: its own text, and its matches in the texts of others."""

    def __init__(self, past: Sequence[Automaton]) -> None:
        self.own = Automaton()
        self._past = [_Match(automaton) for automaton in past]

    def extend(self, tokens: Sequence[int]) -> None:
        own = self.own
        for token in tokens:
            # What stood last is met again now, so from here on its most recent place is the one that counts.
            before = own.links[own.last]
            if before > _ROOT:
                own.ends[before] = len(own.text)
            own.append(token)
            for match in self._past:
                match.advance(token)

    def look_up(self, depth: int, shortest: int) -> tuple[int, list[int]]:
        """The length of the longest match, the row's own where others are no longer, and what followed there."""
        state = self.own.links[self.own.last]
        length = self.own.lengths[state] if state > _ROOT else 0
        tokens = self.own.following(state, min(depth, _PER_MATCHED * length)) if length >= shortest else []
        for match in self._past:
            if match.length > max(length, shortest - 1):
                found = match.following(min(depth, _PER_MATCHED * match.length))
                if found:
                    length, tokens = match.length, found
        return (length if tokens else 0), tokens


class SuffixGuesser:
    """A `Guesser`. Guesses hold tokens of the row's own history and of rows that were closed before it was opened."""

    def __init__(self, shortest: int, past_tokens: int) -> None:
        self._shortest = shortest
        self._past_tokens = past_tokens
        self._rows: dict[int, _Row] = {}
        self._past = [Automaton()]

    def open(self, row: int, tokens: Sequence[int], prompt_length: int = 0, prediction: Sequence[int] = ()) -> None:
        """Start, or start again, with the committed tokens of a row; prompt and answer are one text."""
        self._rows[row] = _Row(self._past)
        self._rows[row].extend(tokens)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The row has more committed tokens."""
        self._rows[row].extend(tokens)

    def guess(self, row: int, depth: int) -> list[int]:
        """At most `depth` tokens that followed the longest suffix that occurred before."""
        return self.look_up(row, depth)[1]

    def look_up(self, row: int, depth: int) -> tuple[int, list[int]]:
        """The guess, and before it the length of the suffix that it followed, in tokens; 0 without one."""
        return self._rows[row].look_up(depth, self._shortest)

    def close(self, row: int) -> None:
        """Forget the row, if it is known, but keep its text for later rows."""
        closed = self._rows.pop(row, None)
        if closed is None:
            return
        if len(self._past[-1].text) >= self._past_tokens:
            self._past = [self._past[-1], Automaton()]
        newest = self._past[-1]
        newest.begin_text()
        for token in closed.own.text[-self._past_tokens :]:
            newest.append(token)
