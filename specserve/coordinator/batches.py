"""From rows to the columnar messages that the workers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specserve.coordinator.requests import RequestState
from specserve.coordinator.scheduler import TargetRow
from specserve.coordinator.trie import Link
from specserve.transport.messages import Array, Dists, Open, Plan, Verify


@dataclass(slots=True)
class CheckedRow:
    """A row as it went to the verifier, with the chain that it offers and the epoch it was sent under."""

    row: TargetRow
    epoch: int
    length: int  # committed tokens when it was sent
    chain: list[Link] = field(default_factory=list)

    @property
    def was_due(self) -> bool:
        """A token was asked for; unlike the row's own `due`, this does not change with the commit."""
        return self.row.start + self.row.feed == self.length

    def emitted(self, kept: int, token: int) -> list[int]:
        """The tokens that a verdict of so many kept drafts, and this token after them, yields."""
        return [link.token for link in self.chain[:kept]] + [token]

    def scored_prompt(self) -> tuple[int, ...]:
        """The prompt tokens whose scores come back with this row."""
        request, start = self.row.state.request, self.row.start + 1
        return () if request.prompt_logprobs is None else request.prompt[start : start + self.row.feed]


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
    feeds = [row.state.tokens[row.start : row.start + row.feed] for row in rows]
    tables = [row.state.draft_table for row in rows]
    return Plan(
        plan=number,
        rows=_ids(rows),
        epochs=_ints([row.epoch for row in rows]),
        starts=_ints([row.start for row in rows]),
        feed_lengths=_ints([row.feed for row in rows]),
        feeds=_flat(feeds),
        depths=_ints([len(row.slots) for row in rows]),
        slots=_flat([row.slots for row in rows]),
        table_lengths=_ints([len(table) for table in tables]),
        tables=_flat(tables),
    )


def verify_message(number: int, rows: Sequence[CheckedRow]) -> Verify:
    """The columnar verification of these rows, with the dists that their chains were drawn from."""
    dists, dist_rows = _gather_dists(rows)
    states = [checked.row.state for checked in rows]
    return Verify(
        round=number,
        rows=np.array([state.row for state in states], dtype=np.int64),
        epochs=_ints([checked.epoch for checked in rows]),
        starts=_ints([checked.row.start for checked in rows]),
        feed_lengths=_ints([checked.row.feed for checked in rows]),
        feeds=_flat([c.row.state.tokens[c.row.start : c.row.start + c.row.feed] for c in rows]),
        due=np.array([checked.row.due for checked in rows], dtype=np.bool_),
        chain_lengths=_ints([len(checked.chain) for checked in rows]),
        chains=_flat([[link.token for link in checked.chain] for checked in rows]),
        dist_rows=_ints(dist_rows),
        dists=dists,
        table_lengths=_ints([len(state.target_table) for state in states]),
        tables=_flat([state.target_table for state in states]),
    )


def _gather_dists(rows: Sequence[CheckedRow]) -> tuple[Dists, list[int]]:
    """Collect the opaque dist rows of all chains into one buffer, and where each node's row is (−1: none)."""
    places: list[int] = []
    wanted: list[tuple[Dists, int]] = []
    for checked in rows:
        chance = checked.row.state.request.sampling.temperature > 0
        for link in checked.chain:
            if link.dists is None or not chance:
                places.append(-1)
            else:
                places.append(len(wanted))
                wanted.append((link.dists, link.row))
    if not wanted:
        return Dists.none(), places
    first = wanted[0][0]
    if all(dists is first for dists, _ in wanted):
        picked = first.rows[[row for _, row in wanted]]
    else:
        picked = np.stack([dists.rows[row] for dists, row in wanted])
    return Dists(first.form, first.width, picked), places


def _ids(rows: Sequence[DraftRow]) -> Array:
    return np.array([row.state.row for row in rows], dtype=np.int64)


def _ints(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int32)


def _flat(lists: Sequence[Sequence[int]]) -> Array:
    return np.array([value for values in lists for value in values], dtype=np.int32)
