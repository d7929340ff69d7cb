"""Awaiting actor calls: every wait has an end, and an actor's own errors come as they were raised."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from specserve.errors import SpecserveError, Unavailable

log = logging.getLogger(__name__)

STATE_TIMEOUT_S = 10.0
"""A process whose `state` takes longer than this is stuck."""

_STEP_S = 0.5

CALL_TIMEOUT_S = 60.0
"""A worker answers between two batches."""

T = TypeVar("T")


async def result(reference: Awaitable[T], timeout_s: float | None = None) -> T:
    """The result of an actor call; an error that the actor raised on purpose comes as it was raised.

    Raises Unavailable when there is no answer within timeout_s seconds.
    """
    try:
        return await asyncio.wait_for(_unwrapped(reference), timeout_s)
    except TimeoutError:
        raise Unavailable(f"a process did not answer within {timeout_s:g} s") from None


async def or_none(reference: Awaitable[T]) -> T | None:
    """The result, or None when the actor is away or does not answer."""
    try:
        return await result(reference, STATE_TIMEOUT_S)
    except (RayActorError, SpecserveError):
        return None


async def state_of(actor: Any, *seen: object) -> Any:
    """What the actor's `state` says, None while it is away. seen is what it takes, if anything.

    An actor that is there but does not answer is killed, so that Ray starts it again: it may never run on with what
    it held before it was replaced.
    """
    try:
        return await _awaited(_unwrapped(actor.state.remote(*seen)))
    except (RayActorError, SpecserveError):
        return None
    except TimeoutError:
        log.warning("a process did not answer for %g s; it is being replaced", STATE_TIMEOUT_S)
        ray.kill(actor, no_restart=False)
        return None


async def _awaited(answer: Awaitable[T]) -> T:
    """Raises TimeoutError after `STATE_TIMEOUT_S`, of which a pause of this process, or of the machine, is no part."""
    asked = asyncio.ensure_future(answer)
    try:
        for _ in range(round(STATE_TIMEOUT_S / _STEP_S)):
            await asyncio.wait({asked}, timeout=_STEP_S)
            if asked.done():
                return asked.result()
        raise TimeoutError
    finally:
        asked.cancel()


async def _unwrapped(reference: Awaitable[T]) -> T:
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, SpecserveError):
            raise error.cause from None
        raise
