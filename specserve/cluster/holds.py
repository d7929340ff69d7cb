"""The calls by which Serve sees what a pipeline works on: one stays open for each request. No Ray in here.

No token passes there, and what becomes of a call costs its request nothing. Both sides forget by themselves: a pipeline
looks each `HOLD_S` whether who made a call is dead, and lets it go then; an ingress makes a call again that returned
too early. A call of an ingress that is merely stuck must not return: the process that answers it, this pipeline's,
would wait in Ray for the word that the answer came, and answer nobody else meanwhile. Calls are not cancelled at their
end, because Serve would count each as a failure; they are let go by name, all that ended lately in one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Collection
from contextvars import Context

from specserve.errors import Unavailable

HOLD_S = 30.0
"""How often it is asked whether who made an open call is dead."""

_RETRY_S = 5.0
_GATHER_S = 0.1

Hold = Callable[[str], Awaitable[None]]
Release = Callable[[Collection[str]], Awaitable[None]]
Dead = Callable[[str], Awaitable[bool]]
"""Whether the ingress whose calls begin with this prefix is dead; False where nobody knows."""


class Holds:
    """The pipeline's side: open calls by name. Each look_s it is asked whether who made one is dead."""

    def __init__(self, dead: Dead, look_s: float = HOLD_S) -> None:
        self._dead = dead
        self._look_s = look_s
        self._let_go: dict[str, asyncio.Event] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._let_go)

    async def hold(self, name: str) -> None:
        """Returns when `release` names it, or its ingress is found dead. Raises Unavailable after `close`."""
        if self._closed:
            raise Unavailable("the pipeline is stopped")
        let_go = self._let_go[name] = asyncio.Event()
        try:
            while not let_go.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(let_go.wait(), self._look_s)
                    return
                if await self._dead(name.rpartition("-")[0]):
                    return
        finally:
            if self._let_go.get(name) is let_go:
                del self._let_go[name]

    def release(self, names: Collection[str]) -> None:
        """Let these go; names that are not held are fine."""
        for name in names:
            if name in self._let_go:
                self._let_go[name].set()

    def close(self) -> None:
        """Let all go, and hold nothing more. Idempotent."""
        self._closed = True
        self.release(tuple(self._let_go))


class Holder:
    """The ingress's side: keeps a call open for each of its requests at one pipeline.

    prefix tells its names from other ingresses'. Call in a running event loop.
    """

    def __init__(self, prefix: str, hold: Hold, release: Release) -> None:
        self._prefix = prefix
        self._hold = hold
        self._release = release
        self._numbers = itertools.count()
        self._ended: dict[str, asyncio.Event] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._releasing: asyncio.Task[None] | None = None

    def begin(self) -> str:
        """Open a call; the name by which it ends."""
        name = f"{self._prefix}-{next(self._numbers)}"
        ended = self._ended[name] = asyncio.Event()
        # The call outlives the HTTP request that is served here, and is none of its parts.
        self._calls[name] = asyncio.get_running_loop().create_task(self._keep(name, ended), context=Context())
        return name

    def end(self, name: str) -> None:
        """The request has ended. Never waits."""
        self._ended.pop(name).set()
        if self._releasing is None or self._releasing.done():
            releasing = self._let_go()
            self._releasing = asyncio.get_running_loop().create_task(releasing, context=Context())

    def close(self) -> None:
        """All requests have ended. What is held is let go still, so that Serve does not wait for it. Idempotent."""
        for name in tuple(self._ended):
            self.end(name)

    async def _keep(self, name: str, ended: asyncio.Event) -> None:
        try:
            while not ended.is_set():
                pause_s = _GATHER_S
                try:
                    await self._hold(name)
                except Exception:  # the pipeline leaves, or is away
                    pause_s = _RETRY_S
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), pause_s)
        finally:
            self._calls.pop(name, None)

    async def _let_go(self) -> None:
        """Until every call of a request that ended has returned: one may reach the pipeline after its release."""
        while True:
            await asyncio.sleep(_GATHER_S)
            over = self._calls.keys() - self._ended.keys()
            if not over:
                return
            with contextlib.suppress(Exception):  # said again below
                await self._release(tuple(over))
