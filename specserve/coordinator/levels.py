"""How full the pools are, and the proof that the books add up (invariants I2 and I3)."""

from __future__ import annotations

from collections.abc import Iterable

from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.requests import RequestState
from specserve.coordinator.rounds import Round
from specserve.coordinator.scheduler import Scheduler
from specserve.coordinator.slots import SlotPool
from specserve.coordinator.worker_drafts import WorkerSource
from specserve.errors import PoolError
from specserve.types import PoolLevels


def pool_levels(
    scheduler: Scheduler, slots: SlotPool, blocks: BlockPool, worker: WorkerSource | None, current: Round | None
) -> PoolLevels:
    """Of the slots and of both models' blocks; worker is the source that a draft worker feeds, if there is one."""
    draft = None if worker is None else worker.link.blocks
    return PoolLevels(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        slots_held=slots.held_count,
        slots_capacity=slots.capacity,
        target_blocks_held=blocks.held_count,
        target_blocks_capacity=blocks.capacity,
        draft_blocks_held=0 if draft is None else draft.held_count,
        draft_blocks_capacity=0 if draft is None else draft.capacity,
        slots_drafting=0 if worker is None else worker.leased,
        slots_verifying=0 if current is None else len(current.slots),
        target_blocks_cached=blocks.cached_count,
        draft_blocks_cached=0 if draft is None else draft.cached_count,
    )


def check_pools(
    states: Iterable[RequestState], slots: SlotPool, blocks: BlockPool, worker: WorkerSource | None
) -> None:
    """Raise PoolError unless each pool adds up, and every request's blocks cover what it has cached."""
    slots.check()
    blocks.check()
    if worker is not None:
        worker.link.blocks.check()
    for state in states:
        if not 0 <= state.target_cached < len(state.tokens):
            raise PoolError(f"request {state.request.id}: {state.target_cached} of {len(state.tokens)} cached")
        if blocks.needed(state.target_cached) > len(state.target_table):
            raise PoolError(f"request {state.request.id}: its blocks do not cover what is cached")


def check_idle(levels: PoolLevels) -> None:
    """Raise PoolError unless nothing is held."""
    if levels.slots_held + levels.target_blocks_held + levels.draft_blocks_held:
        raise PoolError(f"idle, but still held: {levels}")
