"""Workers that compute with hashes instead of weights, and that notice every wrong block, position or stale token.

The next token is a hash of the whole prefix *as read through the block table*, so a coordinator that feeds a wrong
position, shares a block too early or forgets a token produces another text than `reference`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from specserve.transport.messages import (
    Cannot,
    Close,
    Dists,
    Failed,
    Message,
    Open,
    Plan,
    PlanAhead,
    Push,
    PushAhead,
    Verdict,
    Verify,
)

VOCAB = 97


def next_token(prefix: Sequence[int], vocab: int = VOCAB) -> int:
    """The toy target's greedy choice after a prefix."""
    return zlib.crc32(np.asarray(prefix, dtype=np.int32).tobytes()) % vocab


def reference(prompt: Sequence[int], count: int, vocab: int = VOCAB) -> list[int]:
    """The answer that the toy target alone gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


class Pages:
    """KV as (token, position) per slot of a block; unwritten ones read as garbage that changes every hash."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}

    def write(self, table: Sequence[int], position: int, token: int) -> None:
        cell = (table[position // self.block_tokens], position % self.block_tokens)
        self.cells[cell] = (token, position)

    def read(self, table: Sequence[int], length: int) -> list[int]:
        tokens = []
        for position in range(length):
            cell = (table[position // self.block_tokens], position % self.block_tokens)
            token, written_for = self.cells.get(cell, (-1, -1))
            tokens.append(token if written_for == position else -7)
        return tokens


def split(values: np.ndarray, lengths: Sequence[int]) -> list[list[int]]:
    out, at = [], 0
    for length in lengths:
        out.append(values[at : at + length].tolist())
        at += length
    return out


class ToyVerifier:
    """Greedy verification by hash. `lost` maps rows to the positions that are left of their state, once each."""

    def __init__(self, block_tokens: int = 4) -> None:
        self.lost: dict[int, int] = {}
        self.pages = Pages(block_tokens)
        self.opened: dict[int, int] = {}
        self.positions_seen = 0

    def handle(self, message: Message) -> list[Message]:
        match message:
            case Open():
                self.opened[message.row] = message.epoch
            case Close():
                self.opened.pop(message.row, None)
            case Verify():
                return [self._verify(message)]
        return []

    def _cannot(self, batch: Verify) -> Cannot | None:
        left = [
            self.lost.pop(row, start) for row, start in zip(batch.rows.tolist(), batch.starts.tolist(), strict=True)
        ]
        short = np.flatnonzero(np.array(left, dtype=np.int32) < batch.starts)
        covered = np.array(left, dtype=np.int32)[short]
        return Cannot(batch.round, batch.rows[short], batch.epochs[short], covered) if len(short) else None

    def _verify(self, batch: Verify) -> Message:
        cannot = self._cannot(batch)
        if cannot is not None:
            return cannot
        kept, following = [], []
        feeds = split(batch.feeds, batch.feed_lengths)
        chains = split(batch.chains, batch.chain_lengths)
        tables = split(batch.tables, batch.table_lengths)
        for index, row in enumerate(batch.rows.tolist()):
            if self.opened.get(row) != int(batch.epochs[index]):
                return Failed(batch.round, np.array([row], dtype=np.int64), "unknown row")
            start, table = int(batch.starts[index]), tables[index]
            written = feeds[index] + chains[index]
            self.positions_seen += len(written)
            for offset, token in enumerate(written):
                self.pages.write(table, start + offset, token)
            if not batch.due[index]:
                kept.append(0)
                following.append(-1)
                continue
            length = start + len(feeds[index])
            count = 0
            for token in chains[index]:
                if next_token(self.pages.read(table, length + count)) != token:
                    break
                count += 1
            kept.append(count)
            following.append(next_token(self.pages.read(table, length + count)))
        ints = [np.array(column, dtype=np.int32) for column in (kept, following)]
        return Verdict(batch.round, batch.rows, batch.epochs, ints[0], ints[1], 0.0, 0.0)


class ToyDraft:
    """Guesses the toy target's token, wrong about every `miss`-th time (by hash, so reproducibly)."""

    def __init__(self, block_tokens: int = 4, miss: int = 3) -> None:
        self.pages = Pages(block_tokens)
        self.opened: dict[int, int] = {}
        self.made: dict[int, int] = {}  # the last plan that drafted into a slot
        self.unfed = 0  # chains that were not fed, though the coordinator thinks so
        self.miss = miss

    def handle(self, message: Message) -> list[Message]:
        match message:
            case Open():
                self.opened[message.row] = message.epoch
            case Close():
                self.opened.pop(message.row, None)
            case Plan():
                return [self._plan(message)]
            case PlanAhead():
                return self._plan_ahead(message)
        return []

    def _ranking(self, prefix: list[int]) -> list[int]:
        """What it holds likeliest after a prefix, best first; the toy target's token is among the first three."""
        first, right = self._guess(prefix), next_token(prefix)
        others = [right, (right + 2) % VOCAB, (right + 3) % VOCAB, (right + 4) % VOCAB]
        return [first, *[token for token in others if token != first]]

    def _plan_ahead(self, plan: PlanAhead) -> list[Message]:
        texts = split(plan.texts, plan.text_lengths)
        tables = split(plan.tables, plan.table_lengths)
        own = split(plan.own_blocks, plan.own_lengths)
        size = self.pages.block_tokens
        trunk_of = np.repeat(np.arange(len(plan.rows)), plan.branch_counts).tolist()
        slots = iter(plan.slots.tolist())
        events: list[list[tuple[int, int, int]]] = [
            [] for _ in range(1 + int((plan.firsts + plan.depths).max(initial=0)))
        ]
        for index, row in enumerate(plan.rows.tolist()):
            if self.opened.get(row) != int(plan.epochs[index]):
                return [Failed(plan.plan, np.array([row], dtype=np.int64), "unknown row")]
            start, offset = int(plan.starts[index]), int(plan.starts[index] - plan.text_starts[index])
            slot = int(plan.next_slots[index])
            if slot >= 0 and self.made.get(slot) == int(plan.next_plans[index]):
                whole = int(plan.text_starts[index]) + len(texts[index])
                first = max(int(plan.text_starts[index]), int(plan.origins[index]) if len(plan.origins) else 0)
                if self.pages.read(tables[index], whole)[first:] == texts[index][first - whole :]:
                    continue
                self.unfed += 1
            for place, token in enumerate(texts[index][offset:]):
                self.pages.write(tables[index], start + place, token)
        for branch, trunk in enumerate(trunk_of):
            base, parent = int(plan.bases[trunk]), int(plan.parents[branch])
            end = base + parent
            text, table = texts[trunk], tables[trunk]
            chain = text[base - int(plan.text_starts[trunk]) :]
            mine = table[: end // size] + own[branch]
            if plan.copies[branch] >= 0:
                assert plan.copies[branch] == table[end // size]
                for cell in range(size):
                    known = self.pages.cells.get((table[end // size], cell))
                    if known is not None:
                        self.pages.cells[own[branch][0], cell] = known
            ranking = self._ranking(self.pages.read(mine, end))
            token = [each for each in ranking if parent == len(chain) or each != chain[parent]][int(plan.ranks[branch])]
            first = int(plan.firsts[branch])
            events[0].append((branch, -1, token))
            for place in range(int(plan.depths[branch])):
                self.pages.write(mine, end + place, token)
                token = self._guess(self.pages.read(mine, end + place + 1))
                self.made[next(slots)] = plan.plan
                events[first + place].append((branch, place, token))
        events = [each for each in events if each] or [[]]
        return [
            PushAhead(
                plan.plan,
                step,
                step == len(events) - 1,
                *(np.array([event[column] for event in each], dtype=np.int32) for column in range(3)),
                Dists.none(),
                0.001,
            )
            for step, each in enumerate(events)
        ]

    def _guess(self, prefix: list[int]) -> int:
        right = next_token(prefix)
        return (right + 1) % VOCAB if zlib.crc32(bytes(str(prefix), "ascii")) % self.miss == 0 else right

    def _plan(self, plan: Plan) -> Message:
        tokens: list[int] = []
        parents: list[int] = []
        fed: list[bool] = []
        feeds = split(plan.feeds, plan.feed_lengths)
        tables = split(plan.tables, plan.table_lengths)
        for index, row in enumerate(plan.rows.tolist()):
            if self.opened.get(row) != int(plan.epochs[index]):
                return Failed(plan.plan, np.array([row], dtype=np.int64), "unknown row")
            start, depth, table = int(plan.starts[index]), int(plan.depths[index]), tables[index]
            for offset, token in enumerate(feeds[index]):
                self.pages.write(table, start + offset, token)
            length = start + len(feeds[index])
            for step in range(depth):
                token = self._guess(self.pages.read(table, length + step))
                last = step == depth - 1
                if not last:
                    self.pages.write(table, length + step, token)
                tokens.append(token)
                parents.append(step - 1)
                fed.append(not last)
        m = len(tokens)
        return Push(
            plan.plan,
            plan.rows,
            plan.epochs,
            plan.starts + plan.feed_lengths,
            plan.starts + plan.feed_lengths,
            plan.depths,
            np.array(tokens, dtype=np.int32),
            np.array(parents, dtype=np.int32),
            plan.slots,
            np.array(fed, dtype=np.bool_),
            np.ones(m, dtype=np.bool_),
            Dists.none(),
            0.0,
        )
