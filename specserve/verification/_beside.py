"""The seam to a speculator in the verifier's process: a plan made of the verdict, answered by a push, without a wire.

Whatever goes wrong there costs the drafts of one round, never its verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.transport import Worker
from specserve.transport.messages import Array, Drafted, Message, Plan, Push, Verify
from specserve.verification._rows import Row

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beside:
    """A draft worker whose pages are the target's. It is told of every request that the verifier is told of."""

    worker: Worker
    block_tokens: int

    def hear(self, message: Message) -> None:
        """A request is opened or closed."""
        for _ in self.worker.handle(message):
            pass

    def draft(self, message: Verify, rows: Sequence[Row], kept: Array, chosen: Array) -> Drafted:
        """Feed what is committed now, and draft behind it as many tokens as each row asked for and has blocks for."""
        if not len(message.depths) or not rows:
            return Drafted.none()
        feeds = [_committed(row, int(kept[row.index]), int(chosen[row.index])) for row in rows]
        rooms = [len(row.table) * self.block_tokens - row.start for row in rows]
        # The last drafted token is never fed.
        depths = [
            max(0, min(int(message.depths[row.index]), room - len(feed) + 1)) if row.due else 0
            for row, room, feed in zip(rows, rooms, feeds, strict=True)
        ]
        cut = [feed[:room] for feed, room in zip(feeds, rooms, strict=True)]
        (push,) = self.worker.handle(_plan(message, rows, cut, depths))
        if isinstance(push, Push):
            return Drafted(push.chain_lengths, push.tokens, push.dists, push.busy_s)
        log.warning("no drafts behind round %d: %s", message.round, push)
        return Drafted(np.zeros(len(rows), np.int32), np.empty(0, np.int32), Drafted.none().dists, 0.0)


def _committed(row: Row, kept: int, chosen: int) -> list[int]:
    """The row's tokens from its start on that are committed now."""
    behind = [*row.chain[:kept].tolist(), chosen] if row.due else []
    return [*row.feed.tolist(), *behind]


def _plan(message: Verify, rows: Sequence[Row], feeds: Sequence[Sequence[int]], depths: Sequence[int]) -> Plan:
    """The slots are those of this round only: what is drafted leaves with the verdict."""
    tables = [row.table for row in rows]
    return Plan(
        plan=message.round,
        rows=message.rows,
        epochs=message.epochs,
        starts=message.starts,
        feed_lengths=np.array([len(feed) for feed in feeds], np.int32),
        feeds=np.array([token for feed in feeds for token in feed], np.int32),
        depths=np.array(depths, np.int32),
        slots=np.arange(sum(depths), dtype=np.int32),
        table_lengths=message.table_lengths,
        tables=np.concatenate(tables).astype(np.int32),
    )
