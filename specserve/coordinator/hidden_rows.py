"""Hidden states of the target on their way to the draft worker: kept until a plan takes them, never looked at.

A speculator that goes on from the target's states needs, for each token that it is fed, the state at the position
before. Verdicts bring them in the order of positions; what the draft covers is dropped. States that the draft lost, or
that the target computed for another request, do not come again: then the draft begins with what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specserve.coordinator.batches import CheckedRow
from specserve.coordinator.layouts import Layout
from specserve.coordinator.requests import RequestState, Stage
from specserve.coordinator.rounds import Round
from specserve.errors import ProtocolError
from specserve.transport.messages import Array, Hidden, Verdict


@dataclass(slots=True)
class _Kept:
    """States at the positions from `start` on: rows uint8 [n, bytes per row], in pieces as they came."""

    start: int
    pieces: list[Array]

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.pieces))

    def cut(self, start: int, end: int) -> None:
        """Keep those from start to end only, of which the first may not be there."""
        if not self.pieces or (start <= self.start and end >= self.end):
            return
        rows = self.rows(max(start, self.start), end)
        self.start, self.pieces = max(start, self.start), [rows] if len(rows) else []

    def rows(self, start: int, end: int) -> Array:
        """Those from start, not before the first, to end."""
        together = self.pieces[0] if len(self.pieces) == 1 else np.concatenate([*self.pieces])
        return together[start - self.start : max(start, end) - self.start]


class HiddenRows:
    """What there is of each request, for one life of a draft worker."""

    def __init__(self, most: int) -> None:
        """most states of a request are kept."""
        self._most = most
        self._kept: dict[int, _Kept] = {}
        self._dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        self._layout = Layout("hidden states")

    def take(self, current: Round, verdict: Verdict) -> None:
        """Keep what a verdict brought, before its tokens are committed.

        Raises ProtocolError for a wrong number, and for states that do not go with those before. Of these all are
        forgotten: which are right nobody knows, and the next verifier begins with none.
        """
        asked = [entry for entry in current.rows if entry.shown]
        kept = dict(zip(verdict.rows.tolist(), verdict.kept.tolist(), strict=True))
        counts = [entry.shown + kept[entry.state.row] for entry in asked]
        if len(verdict.hidden.rows) != sum(counts):
            raise ProtocolError(
                f"verdict for round {current.number} has {len(verdict.hidden.rows)} hidden states, not {sum(counts)}"
            )
        try:
            self._layout.check(verdict.hidden)
        except ProtocolError:
            self._kept.clear()
            self._layout = Layout("hidden states")
            raise
        if len(verdict.hidden.rows):
            self._dtype = verdict.hidden.dtype
        at = 0
        for entry, count in zip(asked, counts, strict=True):
            if entry.state.stage is Stage.RUNNING and entry.state.epoch == entry.epoch:
                self._add(entry, verdict.hidden.rows[at : at + count])
            at += count

    def _add(self, entry: CheckedRow, rows: Array) -> None:
        state, start = entry.state, entry.start + entry.feed - entry.shown
        kept = self._kept.get(state.row)
        if kept is None or not kept.start <= start <= kept.end:
            kept = self._kept[state.row] = _Kept(start, [])
        kept.cut(max(state.draft_cached - 1, start + len(rows) - self._most), start)
        if not kept.pieces:
            kept.start = start
        kept.pieces.append(rows)

    def first(self, state: RequestState) -> int | None:
        """The first position whose state is there; None where none is."""
        kept = self._kept.get(state.row)
        return kept.start if kept is not None and kept.pieces else None

    def end(self, state: RequestState) -> int:
        """The position behind the last one whose state is there; 0 where none is."""
        kept = self._kept.get(state.row)
        return kept.end if kept is not None and kept.pieces else 0

    def has(self, state: RequestState, start: int, end: int) -> bool:
        """Whether the states at all of these positions are there, the end excluded."""
        kept = self._kept.get(state.row)
        return kept is not None and kept.start <= start and end <= kept.end

    def before(self, feeds: Sequence[tuple[RequestState, int, int]]) -> Hidden:
        """For (request, start, count): the states at the positions before the tokens from start on, all of them."""
        rows = [self._kept[state.row].rows(start - 1, start - 1 + count) for state, start, count in feeds]
        return Hidden(self._dtype, np.concatenate(rows)) if rows else Hidden.none()

    def covered(self, state: RequestState) -> None:
        """The draft covers what it was told to: nothing before the state of its newest token is needed again."""
        kept = self._kept.get(state.row)
        if kept is not None and kept.pieces:
            kept.cut(state.draft_cached - 1, kept.end)

    def forget(self, state: RequestState) -> None:
        """The request is over, or begins anew."""
        self._kept.pop(state.row, None)
