"""What is drafted for a request: a chain of tokens behind its last committed one.

A chain is a value: it is replaced as a whole and never changed. Whoever puts it into a request's place owns one
reference to each of its slots, and gives them back when the chain goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.transport.messages import Dists


@dataclass(slots=True, eq=False)
class Chain:
    """Drafted tokens in order, the first `fed` of which have their KV written.

    slots are parallel to tokens, or empty: model-free speculators have none. Where the tokens were drawn, their dists
    are the rows of `dists` from `row` on.

    sureness are the chances that tokens seemed to have of being kept, each behind those before it; empty where nobody
    said.

    next_slot belongs to one more token, which the draft worker drafts behind these in its plan number `plan`, though
    too late to be offered: what is likely there is a guess of what follows the whole chain.
    """

    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    fed: int = 0
    dists: Dists | None = None
    row: int = 0
    sureness: list[float] = field(default_factory=list, kw_only=True)
    next_slot: int | None = field(default=None, kw_only=True)
    plan: int = field(default=0, kw_only=True)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def held(self) -> list[int]:
        """All slots that it has a reference to."""
        return self.slots if self.next_slot is None else [*self.slots, self.next_slot]

    @property
    def depth(self) -> int:
        """How far it reaches behind the newest committed token."""
        return len(self.tokens)

    @property
    def above(self) -> Sequence[int]:
        """The number of the token before each one, −1 for the first."""
        return range(-1, len(self.tokens) - 1)

    @property
    def dist_count(self) -> int:
        """How many of its dists its tokens were drawn from, the first of them first."""
        return len(self.tokens)

    def dist_places(self, first: int) -> Sequence[int]:
        """Which dist each token was drawn from, if its dists begin with number `first`."""
        return range(first, first + len(self.tokens))

    def path(self, last: int) -> list[int]:
        """The tokens from the first one to number `last`; none for −1."""
        return self.tokens[: last + 1]

    def length(self, last: int) -> int:
        """How many tokens `path` has."""
        return last + 1

    def reach(self, last: int) -> int:
        """How many tokens the longest path through number `last` has."""
        del last
        return len(self.tokens)

    def first(self, count: int) -> Chain:
        """The first `count` tokens of it."""
        if count >= len(self.tokens):
            return self
        behind = self.slots[count] if self.slots else None
        cut = self.tokens[:count], self.slots[:count], min(self.fed, count)
        sure = self.sureness[:count]
        return Chain(*cut, self.dists, self.row, sureness=sure, next_slot=behind, plan=self.plan)

    def only(self, numbers: Sequence[int]) -> Chain:
        """These of its tokens, in order, each with all that are before it and with its siblings before it."""
        return self.first(len(numbers))

    def tried(self, last: int) -> list[tuple[float, bool]]:
        """How sure the draft was of each token whose turn came, where it said, and whether it was kept."""
        turns = self.sureness[: last + 2]
        return [(sure, place <= last) for place, sure in enumerate(turns)]

    def fed_along(self, tokens: Sequence[int]) -> int:
        """How many of these committed tokens, from the first on without a gap, were drafted here and fed."""
        for place, (drafted, token) in enumerate(zip(self.tokens[: self.fed], tokens, strict=False)):
            if drafted != token:
                return place
        return min(self.fed, len(tokens))


NOTHING = Chain()
"""No draft. Shared, as chains never change."""
