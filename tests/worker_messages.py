"""Short ways to write the messages that workers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specserve.transport.messages import Dists, Open, Plan, Push, Verify
from specserve.types import Sampling


def ints(values: Sequence[int]) -> np.ndarray:
    """int32 [n]."""
    return np.array(values, dtype=np.int32)


def flat(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """int32, all rows one after the other."""
    return ints([value for row in rows for value in row])


def opened(
    row: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    rule: str = "rejection",
    seed: int = 0,
    epoch: int = 0,
    branch: int = 0,
    tokens: Sequence[int] = (0,),
    prompt_length: int = 1,
    end_tokens: tuple[int, ...] = (),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    **sampling: Any,
) -> Open:
    """An `Open`; workers need its tokens only for processors that look back and for prompt scores."""
    chosen = Sampling(temperature, top_p, top_k, **sampling)
    return Open(
        row=row,
        epoch=epoch,
        tokens=ints(tokens),
        prompt_length=prompt_length,
        sampling=chosen,
        end_tokens=end_tokens,
        rule=rule,
        seed=seed,
        branch=branch,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


@dataclass
class Part:
    """One row of a plan or a round."""

    row: int
    start: int
    feed: Sequence[int]
    table: Sequence[int]
    slots: Sequence[int] = ()
    chain: Sequence[int] = ()
    dist_rows: Sequence[int] | None = None
    due: bool = True
    epoch: int = 0


def plan(parts: Sequence[Part], number: int = 1) -> Plan:
    """A `Plan` of these rows, one drafted token per slot."""
    return Plan(
        plan=number,
        rows=np.array([p.row for p in parts], dtype=np.int64),
        epochs=ints([p.epoch for p in parts]),
        starts=ints([p.start for p in parts]),
        feed_lengths=ints([len(p.feed) for p in parts]),
        feeds=flat([p.feed for p in parts]),
        depths=ints([len(p.slots) for p in parts]),
        slots=flat([p.slots for p in parts]),
        table_lengths=ints([len(p.table) for p in parts]),
        tables=flat([p.table for p in parts]),
    )


def verify(parts: Sequence[Part], dists: Dists | None = None, number: int = 1) -> Verify:
    """A `Verify` of these rows; tokens have no dist unless `dist_rows` says so."""
    chosen = [[-1] * len(p.chain) if p.dist_rows is None else p.dist_rows for p in parts]
    return Verify(
        round=number,
        rows=np.array([p.row for p in parts], dtype=np.int64),
        epochs=ints([p.epoch for p in parts]),
        starts=ints([p.start for p in parts]),
        feed_lengths=ints([len(p.feed) for p in parts]),
        feeds=flat([p.feed for p in parts]),
        due=np.array([p.due for p in parts], dtype=bool),
        chain_lengths=ints([len(p.chain) for p in parts]),
        chains=flat([p.chain for p in parts]),
        dist_rows=flat(chosen),
        dists=Dists.none() if dists is None else dists,
        table_lengths=ints([len(p.table) for p in parts]),
        tables=flat([p.table for p in parts]),
    )


def with_drafts(parts: Sequence[Part], push: Push) -> list[Part]:
    """The rows of a plan as rows of a round that offers what the push brought."""
    ends = np.cumsum(push.chain_lengths)
    result = []
    for part, end, length in zip(parts, ends, push.chain_lengths, strict=True):
        span = range(end - length, end)
        shipped = [int(i) for i in span] if len(push.dists.rows) else None
        chain = push.tokens[end - length : end].tolist()
        result.append(Part(part.row, part.start, part.feed, part.table, chain=chain, dist_rows=shipped))
    return result
