"""From rows to the columnar messages that the workers take."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain as chained

import numpy as np

from specserve.coordinator.chain import Chain
from specserve.coordinator.requests import RequestState
from specserve.transport.messages import Array, Dists, Open, Plan, Verify


@dataclass(slots=True)
class CheckedRow:
    """A row as it went to the verifier: the feed, the chain that it offers, and the epoch it was sent under."""

    state: RequestState
    epoch: int
    start: int
    feed: int
    due: bool
    length: int  # committed tokens when it was sent
    chain: Chain

    def emitted(self, kept: int, token: int) -> list[int]:
        """The tokens that a verdict of so many kept drafts, and this token after them, yields."""
        return [*self.chain.tokens[:kept], token]

    def scored_prompt(self) -> tuple[int, ...]:
        """The prompt tokens whose scores come back with this row."""
        request, start = self.state.request, self.start + 1
        return () if request.prompt_logprobs is None else request.prompt[start : start + self.feed]


@dataclass(slots=True)
class DraftRow:
    """One request's share of a plan: feed tokens[start : start + feed], then draft one token per leased slot."""

    state: RequestState
    epoch: int
    start: int
    feed: int
    slots: list[int]


def open_message(state: RequestState, rule: str) -> Open:
    """What a request is, for a worker that has not heard of this epoch. `rule` is the deployment's."""
    request = state.request
    return Open(
        row=state.row,
        epoch=state.epoch,
        tokens=np.array(state.tokens, dtype=np.int32),
        prompt_length=len(request.prompt),
        sampling=request.sampling,
        end_tokens=tuple(sorted(state.end_tokens)),
        rule=rule if request.rule is None else request.rule,
        seed=request.seed,
        branch=request.branch,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        structured=request.structured,
    )


def plan_message(number: int, rows: Sequence[DraftRow]) -> Plan:
    """The columnar plan of these rows; tables cover the feed and all drafts but the last, which is never fed."""
    tables = [row.state.draft_table for row in rows]
    return Plan(
        plan=number,
        rows=np.array([row.state.row for row in rows], dtype=np.int64),
        epochs=ints([row.epoch for row in rows]),
        starts=ints([row.start for row in rows]),
        feed_lengths=ints([row.feed for row in rows]),
        feeds=flat([row.state.tokens[row.start : row.start + row.feed] for row in rows]),
        depths=ints([len(row.slots) for row in rows]),
        slots=flat([row.slots for row in rows]),
        table_lengths=ints([len(table) for table in tables]),
        tables=joined(tables),
    )


def verify_message(number: int, rows: Sequence[CheckedRow]) -> Verify:
    """The columnar verification of these rows, with the dists that their chains were drawn from."""
    dists, dist_rows = _gather_dists(rows)
    tables = [checked.state.target_table for checked in rows]
    return Verify(
        round=number,
        rows=np.array([checked.state.row for checked in rows], dtype=np.int64),
        epochs=ints([checked.epoch for checked in rows]),
        starts=ints([checked.start for checked in rows]),
        feed_lengths=ints([checked.feed for checked in rows]),
        feeds=flat([checked.state.tokens[checked.start : checked.start + checked.feed] for checked in rows]),
        due=np.array([checked.due for checked in rows], dtype=np.bool_),
        chain_lengths=ints([len(checked.chain.tokens) for checked in rows]),
        chains=flat([checked.chain.tokens for checked in rows]),
        dist_rows=dist_rows,
        dists=dists,
        table_lengths=ints([len(table) for table in tables]),
        tables=joined(tables),
    )


def _gather_dists(rows: Sequence[CheckedRow]) -> tuple[Dists, Array]:
    """Collect the opaque dist rows of all chains into one buffer, and where each node's row is (−1: none)."""
    sources: list[Dists | None] = []
    at: list[int] = []
    for checked in rows:
        chain = checked.chain
        if chain.sources and checked.state.request.sampling.temperature > 0:
            sources += chain.sources
            at += chain.rows
        else:
            sources += [None] * len(chain.tokens)
            at += [0] * len(chain.tokens)
    known = {id(source): source for source in sources if source is not None}
    if not known:
        return Dists.none(), np.full(len(sources), -1, dtype=np.int32)
    origin, row = np.array([id(source) for source in sources]), np.array(at)
    drawn = np.array([source is not None for source in sources])
    origin, row = origin[drawn], row[drawn]
    first = next(iter(known.values()))
    picked = np.empty((len(row), first.rows.shape[1]), dtype=np.uint8)
    for identity, source in known.items():
        mine = origin == identity
        picked[mine] = source.rows[row[mine]]
    places = np.where(drawn, np.cumsum(drawn) - 1, -1).astype(np.int32)
    return Dists(first.form, first.width, picked), places


def ints(values: Sequence[int]) -> Array:
    """int32 [n]."""
    return np.array(values, dtype=np.int32)


def flat(lists: Iterable[Sequence[int]]) -> Array:
    """All numbers of all lists, int32."""
    return np.array(list(chained.from_iterable(lists)), dtype=np.int32)


def joined(tables: Sequence[array[int]]) -> Array:
    """All blocks of all tables, int32."""
    return np.frombuffer(bytearray().join(tables), dtype=np.int32)
