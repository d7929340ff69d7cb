"""A `Verify` message as rows, each checked on its own, so that one bad row spares the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.errors import ProtocolError
from specserve.models import RowStates, TokenTree
from specserve.models._stretches import Stretch, one_length, split, table_covers, tokens_in_range
from specserve.sampling.processors import Place
from specserve.sampling.profiles import Profile, Profiles
from specserve.transport.messages import Array, Cannot, Verify


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a round.

    index is its place in the message, id the request's number; feed [f], chain [c], dist_rows [c] and table as in
    `messages.Verify`. parents [c] where the drafted tokens are a tree, None where they are a chain; of the feed's last
    `shown` tokens hidden states are sent. The row's places, which show logits, are the newest committed token (0) and
    drafted token n (n + 1).
    """

    index: int
    id: int
    profile: Profile
    start: int
    feed: Array
    chain: Array
    dist_rows: Array
    table: Array
    due: bool
    parents: tuple[int, ...] | None = None
    shown: int = 0

    @property
    def first(self) -> int:
        """The absolute position of the first token that the target may choose."""
        return self.start + len(self.feed)

    @property
    def prompt_tokens(self) -> int:
        """How many prompt tokens are to be scored here: each one that follows a fed one."""
        prompt = self.profile.prompt
        return max(0, min(len(self.feed), len(prompt) - 1 - self.start)) if prompt else 0

    @property
    def looked_at(self) -> int:
        """How many of the last positions show logits: all that a token is due after, and all where prompts score."""
        if self.prompt_tokens:
            return len(self.feed) + len(self.chain)
        return len(self.chain) + 1 if self.due else 0

    @property
    def stretch(self) -> Stretch:
        """What the target reads: feed and chain."""
        tree = None if self.parents is None else TokenTree(self.first, np.array(self.parents, dtype=np.int64))
        tokens = [*self.feed.tolist(), *self.chain.tolist()]
        seen = self.shown + len(self.chain) if self.shown else 0
        return Stretch(self.start, tokens, self.table, self.looked_at, self.id, tree, seen)

    def path(self, last: int) -> list[int]:
        """The drafted tokens, by number, from the first one to this one; none for −1."""
        if self.parents is None:
            return list(range(last + 1))
        path: list[int] = []
        while last >= 0:
            path.append(last)
            last = self.parents[last]
        return path[::-1]

    def tokens_to(self, last: int) -> list[int]:
        """The tokens of `path`."""
        tokens: list[int] = self.chain[self.path(last)].tolist()
        return tokens


def read(message: Verify, profiles: Profiles, vocab_size: int, block_tokens: int) -> tuple[list[Row], dict[int, str]]:
    """The rows of a message that can be served, and why for each of the others by its row id.

    block_tokens is the size of the backend's pages. Raises ProtocolError when the message's columns contradict each
    other, which says nothing of single rows.
    """
    one_length(
        rows=message.rows,
        epochs=message.epochs,
        starts=message.starts,
        feed_lengths=message.feed_lengths,
        due=message.due,
        chain_lengths=message.chain_lengths,
        table_lengths=message.table_lengths,
    )
    if len(message.shown) not in (0, len(message.rows)):
        raise ProtocolError(f"{len(message.shown)} rows are asked for hidden states or not, of {len(message.rows)}")
    shown = message.shown.tolist() or [0] * len(message.rows)
    if len(message.depths) not in (0, len(message.rows)):
        raise ProtocolError(f"{len(message.depths)} depths to draft beside, of {len(message.rows)} rows")
    whole = len(message.parents) > 0
    parents = split("parents", message.parents, message.chain_lengths) if whole else [None] * len(message.rows)
    columns = zip(
        message.rows.tolist(),
        message.epochs.tolist(),
        message.starts.tolist(),
        split("feeds", message.feeds, message.feed_lengths),
        split("chains", message.chains, message.chain_lengths),
        split("dist_rows", message.dist_rows, message.chain_lengths),
        split("tables", message.tables, message.table_lengths),
        message.due.tolist(),
        parents,
        shown,
        strict=True,
    )
    rows, faults = [], {}
    for index, (row_id, epoch, start, feed, chain, dist_rows, table, due, above, shows) in enumerate(columns):
        try:
            row = Row(
                index,
                row_id,
                profiles.find(row_id, epoch),
                start,
                feed,
                chain,
                dist_rows,
                table,
                due,
                _tree(above),
                shows,
            )
            _check(row, vocab_size, len(message.dists.rows), block_tokens)
            rows.append(row)
        except ProtocolError as error:
            faults[row_id] = f"row {row_id}: {error.message}"
    return rows, faults


def _tree(parents: Array | None) -> tuple[int, ...] | None:
    """The parents of a tree's nodes; None for a chain. Raises ProtocolError for what is no tree."""
    if parents is None or (parents == np.arange(-1, len(parents) - 1)).all():
        return None
    if (parents < -1).any() or (parents >= np.arange(len(parents))).any():
        raise ProtocolError(f"parents {parents.tolist()}: a node comes behind its parent, which is −1 for the first")
    return tuple(parents.tolist())


def uncovered(message: Verify, rows: Sequence[Row], states: RowStates) -> Cannot | None:
    """The rows that cannot start where they were told to, and what they can go on from; None when all can."""
    covered = {row.index: states.covered(row.id, row.start) for row in rows}
    short = [row.index for row in rows if covered[row.index] != row.start]
    if not short:
        return None
    positions = np.array([covered[index] for index in short], dtype=np.int32)
    return Cannot(message.round, message.rows[short], message.epochs[short], positions)


def _check(row: Row, vocab_size: int, dists: int, block_tokens: int) -> None:
    if not len(row.feed):
        raise ProtocolError("an empty feed; the newest committed token, at least, must be fed")
    if len(row.chain) and not row.due:
        raise ProtocolError(f"{len(row.chain)} drafted tokens, but no token is due")
    if row.start < 0:
        raise ProtocolError(f"a feed that starts at position {row.start}")
    table_covers(row.table, row.first + len(row.chain), block_tokens)
    tokens_in_range(row.feed, vocab_size)
    tokens_in_range(row.chain, vocab_size)
    if not 0 <= row.shown <= len(row.feed):
        raise ProtocolError(f"the hidden states of {row.shown} tokens, of a feed of {len(row.feed)}")
    if len(row.dist_rows) and (row.dist_rows.min() < -1 or row.dist_rows.max() >= dists):
        raise ProtocolError(f"dist rows {row.dist_rows.tolist()}, but there are {dists} dists")
    row.profile.wrote(row.start, row.feed.tolist())


def judged_places(rows: Sequence[Row]) -> list[int] | None:
    """Which rows of the round's logits belong to due tokens, in order; None when all do."""
    if not any(row.prompt_tokens for row in rows):
        return None
    places: list[int] = []
    at = 0
    for row in rows:
        at += row.looked_at
        places += range(at - len(row.chain) - 1, at) if row.due else ()
    return places


def processed_places(rows: Sequence[Row]) -> list[Place]:
    """The rows of the due tokens' logits that processors change."""
    places: list[Place] = []
    at = 0
    for row in rows:
        if not row.due:
            continue
        if row.profile.processors is not None:
            for place in range(len(row.chain) + 1):
                places.append(Place(at + place, row.profile.processors, row.tokens_to(place - 1)))
        at += len(row.chain) + 1
    return places
