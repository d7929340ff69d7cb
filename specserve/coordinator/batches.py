"""From rows to the columnar messages that the workers take."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain as chained

import numpy as np

from specserve.coordinator.chain import Chain
from specserve.coordinator.requests import RequestState
from specserve.coordinator.trees import Tree
from specserve.transport.messages import Array, Dists, Open, Plan, Verify

INT32, INT64, _BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.bool_)
"""Made once: from the names of types they would be made anew, which takes as long as a small array."""


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
    shown: int = 0  # of so many of its last tokens hidden states are wanted, and of what is kept of the chain
    next_depth: int | None = None  # tokens to draft beside the verifier, behind its verdict; None where nobody does
    again: int = 0  # fed positions that the target had before, and lost

    def emitted(self, last: int, token: int) -> list[int]:
        """The tokens that a verdict of this last kept draft (−1: none), and this token after it, yields."""
        tokens = self.chain.path(last)
        tokens.append(token)
        return tokens

    def scored_prompt(self) -> tuple[int, ...]:
        """The prompt tokens whose scores come back with this row."""
        request, start = self.state.request, self.start + 1
        return () if request.prompt_logprobs is None else request.prompt[start : start + self.feed]


@dataclass(slots=True)
class DraftRow:
    """One request's share of a plan: feed tokens[start : start + feed], then draft one token per leased slot.

    levels: those of the tree that is drafted instead, 0 for a chain; nodes: the most that it may have.
    """

    state: RequestState
    epoch: int
    start: int
    feed: int
    slots: list[int]
    levels: int = 0
    nodes: int = 0


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
    levels = [row.levels for row in rows]
    trees = any(levels)
    return Plan(
        plan=number,
        rows=np.array([row.state.row for row in rows], dtype=INT64),
        epochs=ints([row.epoch for row in rows]),
        starts=ints([row.start for row in rows]),
        feed_lengths=ints([row.feed for row in rows]),
        feeds=flat([row.state.tokens[row.start : row.start + row.feed] for row in rows]),
        depths=ints([len(row.slots) for row in rows]),
        slots=flat([row.slots for row in rows]),
        table_lengths=ints([len(table) for table in tables]),
        tables=joined(tables),
        levels=ints(levels if trees else []),
        nodes=ints([row.nodes for row in rows] if trees else []),
    )


def verify_message(number: int, rows: Sequence[CheckedRow]) -> Verify:
    """The columnar verification of these rows, with the dists that their chains were drawn from."""
    dists, dist_rows = _gather_dists(rows)
    tables = [checked.state.target_table for checked in rows]
    numbers = [
        (
            each.state.row,
            each.epoch,
            each.start,
            each.feed,
            each.due,
            len(each.chain.tokens),
            len(each.state.target_table),
        )
        for each in rows
    ]
    table = columns(numbers, 7)
    _, epochs, starts, feed_lengths, due, chain_lengths, table_lengths = table.astype(INT32)
    shown = [checked.shown for checked in rows]
    depths = [checked.next_depth for checked in rows if checked.next_depth is not None]
    return Verify(
        round=number,
        rows=table[0],
        epochs=epochs,
        starts=starts,
        feed_lengths=feed_lengths,
        feeds=flat([checked.state.tokens[checked.start : checked.start + checked.feed] for checked in rows]),
        due=due.astype(_BOOL),
        chain_lengths=chain_lengths,
        chains=flat([checked.chain.tokens for checked in rows]),
        dist_rows=dist_rows,
        dists=dists,
        table_lengths=table_lengths,
        tables=joined(tables),
        shown=ints(shown if any(shown) else []),
        depths=ints(depths),
        parents=_parents(rows),
    )


def _parents(rows: Sequence[CheckedRow]) -> Array:
    """The node before each one, in order; nothing where all rows are chains."""
    trees = any(isinstance(checked.chain, Tree) for checked in rows)
    return flat([checked.chain.above for checked in rows] if trees else [])


def _gather_dists(rows: Sequence[CheckedRow]) -> tuple[Dists, Array]:
    """Collect the opaque dist rows of all chains into one buffer, and where each node's row is (−1: none)."""
    sources: list[Dists] = []  # pushes, or what was picked out of several
    starts: dict[int, int] = {}  # of each by its identity, were they one behind the other
    end = 0
    picked: list[int] = []
    places: list[int] = []
    for checked in rows:
        chain, count = checked.chain, len(checked.chain.tokens)
        if not count:
            continue
        dists = chain.dists
        if dists is None or checked.state.request.sampling.temperature <= 0:
            places += [-1] * count
            continue
        start = starts.get(id(dists))
        if start is None:
            start = starts[id(dists)] = end
            sources.append(dists)
            end += len(dists.rows)
        first = start + chain.row
        places += chain.dist_places(len(picked))
        picked += range(first, first + chain.dist_count)
    if not picked:
        return Dists.none(), ints(places)
    together = sources[0].rows if len(sources) == 1 else np.concatenate([dists.rows for dists in sources])
    return Dists(sources[0].form, sources[0].width, together[picked]), ints(places)


def ints(values: Sequence[int]) -> Array:
    """int32 [n]."""
    return np.array(values, dtype=INT32)


def columns(rows: Sequence[Sequence[int]], count: int) -> Array:
    """int64 [count, n] of n rows of `count` numbers each, every column in one piece: quicker than one by one."""
    return np.ascontiguousarray(np.fromiter(chained.from_iterable(rows), INT64, count * len(rows)).reshape(-1, count).T)


def flat(lists: Iterable[Sequence[int]]) -> Array:
    """All numbers of all lists, int32."""
    return np.array(list(chained.from_iterable(lists)), dtype=INT32)


def joined(tables: Sequence[array[int]]) -> Array:
    """All blocks of all tables, int32."""
    return np.frombuffer(bytearray().join(tables), dtype=INT32)
