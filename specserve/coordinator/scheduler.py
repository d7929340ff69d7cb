"""Who takes part in the next round, with how many positions.

Everything is a feed: a row writes committed tokens that a worker lacks and, where these end at the newest token, asks
for the next one. Decode rows come first and always get their one position; prompts get a reserved share beside them,
in order of admission, so neither starves the other, and no more than a budget, because running answers wait for the
whole round (stall-free batching: Sarathi-Serve, Agrawal et al. 2024). When KV blocks run short, drafts go first, then
the youngest request gives its blocks back and waits to be refilled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specserve.config import EngineConfig
from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.chain import Chain
from specserve.coordinator.requests import RequestState, Stage
from specserve.coordinator.sharing import reusable, shareable, siblings
from specserve.tree_shape import TreeShape


@dataclass(slots=True)
class TargetRow:
    """One request's share of a target forward: tokens[start : start + feed] and, when due, drafts to `depth`.

    due: the feed ends at the newest committed token. shape: the limits of its tree, where trees are drafted. guessed:
    the most tokens of a guess that nobody waits for. chosen: the numbers of those of its drafted tokens that are
    checked; None for all.
    """

    state: RequestState
    start: int
    feed: int
    depth: int
    due: bool
    shape: TreeShape | None = None
    guessed: int = 0
    chosen: Sequence[int] | None = None

    @property
    def most(self) -> int:
        """The most drafted tokens that it may check."""
        return max(self.guessed, drafted(self.depth, self.shape))

    @property
    def draft(self) -> Chain:
        """What of its request's draft is to be checked."""
        chain = self.state.chain
        return chain.first(self.depth) if self.chosen is None else chain.only(self.chosen)

    @property
    def places(self) -> int:
        """The most places of its chain, or its tree, that get tokens; each has a slot."""
        return self.depth if self.shape is None else self.shape.parents(self.depth)


class DraftSizes(Protocol):
    """What of a depth policy matters here: how many tokens a row is to check, or levels and limits of its tree."""

    def of(self, state: RequestState) -> int: ...
    def shape(self, state: RequestState) -> TreeShape | None: ...
    def guessed(self, state: RequestState) -> int: ...


class Scheduler:
    """Queues and plans; it decides, the engine acts."""

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockPool,
        policy: DraftSizes,
        preempt: Callable[[RequestState], None],
    ) -> None:
        self._config = config
        self._blocks = blocks
        self.policy = policy  # how deep and how large the drafts are that decode rows check
        self._preempt = preempt
        self.waiting: deque[RequestState] = deque()
        self.spare_blocks = 0  # of a sibling's prompt that are computed anew, for hidden states before what it covers
        self.lookahead = 0  # positions behind what a round checks, for drafts that are made beside the verifier
        self.running: list[RequestState] = []  # in order of admission: the last one is the youngest

    def admit(self, now_s: float) -> list[RequestState]:
        """Move requests from the queue to running, first come first served, while rows and blocks allow: these."""
        admitted: list[RequestState] = []
        if not self.waiting:
            return admitted
        promised = sum(self._missing(state) for state in self.running if not state.decoding)
        while self.waiting and len(self.running) < self._config.max_requests:
            state = self.waiting[0]
            wanted = self._missing(state)
            if self.running and wanted > self._blocks.free_count - promised:
                break
            promised += wanted
            self.waiting.popleft()
            state.stage = Stage.RUNNING
            if state.started_s is None:
                state.started_s = now_s
            self.running.append(state)
            admitted.append(state)
        return admitted

    def _missing(self, state: RequestState) -> int:
        """Blocks that a request needs of its own until it decodes."""
        missing = self._blocks.needed(len(state.tokens) + 1) - len(state.target_table)
        positions = 0 if state.target_table else self._shareable(state)
        if positions and siblings(state, self.running):
            missing -= self._blocks.needed(positions)
        elif reusable(state):
            missing -= self._blocks.held_prefix(state.keys)
        return max(0, missing)

    def decoding(self) -> list[RequestState]:
        """The running requests whose next row is a decode row."""
        return [state for state in self.running if state.decoding]

    def plan(self, decoding: Sequence[RequestState]) -> list[TargetRow]:
        """The rows of the next round, their blocks allocated; may preempt the youngest to make room.

        decoding: what `decoding` said, and nothing has changed since.
        """
        rows: list[TargetRow] = []
        reading = len(decoding) < len(self.running)  # now: making room for a decoding one may end that one's turn
        share = self._depth_share(len(decoding))
        depth_of, trees = self.policy.of, self._config.tree_shape is not None
        for state in decoding:
            if state.stage is Stage.RUNNING:
                depth = depth_of(state)
                shape = self.policy.shape(state) if trees and depth else None
                fitting = min(share, depth) if shape is None else shape.within(depth, share)
                self._add_decode(rows, state, fitting, shape, min(share, self.policy.guessed(state)))
        if reading:
            self._add_prompts(rows)
        return [row for row in rows if row.state.stage is Stage.RUNNING]

    def _add_prompts(self, rows: list[TargetRow]) -> None:
        """Rows of requests that do not decode yet, beside these of those that do."""
        budget = self._config.max_batch_tokens - sum(row.feed + row.most for row in rows)
        if rows:
            budget = min(budget, self._config.prefill_budget)
        for state in list(self.running):
            if budget <= 0:
                break
            if state.stage is Stage.RUNNING and not state.decoding and not self._waits_for_sibling(state):
                self._reuse(state)
                budget -= self._add_feed(rows, state, min(budget, self._config.prefill_chunk))

    def _waits_for_sibling(self, state: RequestState) -> bool:
        """Take a sibling's prompt over, if there is one; true while an earlier one is still filling it."""
        positions = 0 if state.target_table else self._shareable(state)
        if not positions:
            return False
        family = siblings(state, self.running)
        filled = [other for other in family if other.target_cached >= positions]
        if filled:
            self._take_over(state, filled[0], positions)
            return False
        place = self.running.index(state)
        return any(self.running.index(other) < place for other in family)

    def _reuse(self, state: RequestState) -> None:
        """A request that begins, or begins anew, goes on from what the cache has of it."""
        if not reusable(state):
            return
        state.target_cached = self._blocks.reuse(state.target_table, state.keys)
        if state.cached_prompt is None:
            state.cached_prompt = state.target_cached

    def _shareable(self, state: RequestState) -> int:
        return shareable(state, self._blocks.block_tokens, self.spare_blocks)

    def _take_over(self, state: RequestState, other: RequestState, positions: int) -> None:
        state.target_table = self._blocks.fork(other.target_table, positions)
        state.target_cached = positions

    def bequeath(self, state: RequestState) -> None:
        """A request ends: siblings that wait for its prompt take it over before its blocks go."""
        if state.request.family is None:
            return
        for other in siblings(state, self.running):
            positions = 0 if other.target_table else self._shareable(other)
            if 0 < positions <= state.target_cached:
                self._take_over(other, state, positions)

    def _depth_share(self, decoding: int) -> int:
        """The most drafted tokens for every decode row alike, after a share is set aside for prompts that wait."""
        if not decoding:
            return 0
        left = self._config.max_batch_tokens - decoding
        if len(self.running) > decoding:
            left -= min(self._config.prefill_chunk, self._config.prefill_budget, left)
        return left // decoding

    def _add_decode(
        self, rows: list[TargetRow], state: RequestState, depth: int, shape: TreeShape | None, guessed: int
    ) -> None:
        length, most = len(state.tokens), depth if shape is None else drafted(depth, shape)
        if guessed > most and not self._covered(state, length + guessed):
            guessed = most
        if guessed <= most and not self._covered(state, length + most):
            depth = guessed = 0
            if not self._make_room(state, length):
                return
        rows.append(TargetRow(state, state.target_cached, 1, depth, True, shape, guessed))

    def _covered(self, state: RequestState, positions: int) -> bool:
        """`_cover`; most rows have their blocks already: a glance spares them the call."""
        held = len(state.target_table) * self._blocks.block_tokens
        return positions + self.lookahead <= held or self._cover(state, positions)

    def _add_feed(self, rows: list[TargetRow], state: RequestState, budget: int) -> int:
        lacking = len(state.tokens) - state.target_cached
        feed = min(budget, lacking)
        if not self._make_room(state, state.target_cached + feed):
            return 0
        if feed == lacking and self.lookahead:
            self._blocks.cover(state.target_table, len(state.tokens) + self.lookahead)
        rows.append(TargetRow(state, state.target_cached, feed, 0, feed == lacking))
        return feed

    def _cover(self, state: RequestState, positions: int) -> bool:
        """Cover these positions and, where there is room, those behind them that drafts may take."""
        if self.lookahead and self._blocks.cover(state.target_table, positions + self.lookahead):
            return True
        return self._blocks.cover(state.target_table, positions)

    def _make_room(self, state: RequestState, positions: int) -> bool:
        """Cover `positions`, preempting the youngest while blocks lack. False when `state` itself had to go."""
        while not self._blocks.cover(state.target_table, positions):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is state:
                return False
        return True

    def preempt(self, state: RequestState) -> None:
        """Take a running request's cache away and put it in front of the queue; its committed tokens stay."""
        self.running.remove(state)
        state.stage = Stage.WAITING
        self._preempt(state)
        self.waiting.appendleft(state)

    def remove(self, state: RequestState) -> None:
        """Forget a request that has ended."""
        if state.stage is Stage.RUNNING:
            self.running.remove(state)
        elif state.stage is Stage.WAITING:
            self.waiting.remove(state)
        state.stage = Stage.ENDED


def drafted(depth: int, shape: TreeShape | None) -> int:
    """The most tokens that are drafted to this depth: of a chain, or of a tree of this shape."""
    return depth if shape is None else shape.nodes(depth)
