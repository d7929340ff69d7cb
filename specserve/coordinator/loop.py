"""The thread that drives an engine: take everything that has arrived, advance, flush, sleep until more comes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from specserve.coordinator.engine import Engine
from specserve.coordinator.ingresses import Ingresses, Line
from specserve.errors import SpecserveError, Unavailable
from specserve.transport import Arrived, Mailbox, PeerLost
from specserve.transport.messages import Cancel, Submit
from specserve.types import Delta, Failure, Request, RequestStats

log = logging.getLogger("specserve.coordinator")

WORKERS = ("target", "draft")
"""Peers with these names are workers; every other peer is an ingress."""

_LONGEST_WAIT_S = 3600.0
"""Clocks of the system refuse to wait for centuries, which a bound in the configuration may amount to."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A function to run on the loop's thread."""

    run: Callable[[], Any]
    result: Future[Any]


class Loop:
    """Owns the thread side of one engine. `run` in a thread of your own, or `start` for one made here."""

    def __init__(self, engine: Engine, mailbox: Mailbox, ingresses: Ingresses | None = None) -> None:
        """ingresses are those whose messages the mailbox brings; whatever any other peer sends is dropped."""
        self._engine = engine
        self._mailbox = mailbox
        self._ingresses = Ingresses(time.monotonic, 0.0) if ingresses is None else ingresses
        self._stopping = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._progress = 0

    @property
    def progress(self) -> int:
        """How many times the loop went round; a hang shows as a number that stands still while work is there."""
        return self._progress

    def start(self) -> None:
        """Run in a daemon thread."""
        self._thread = threading.Thread(target=self.run, name="specserve-coordinator", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End `run`, from any thread, and wait for it unless called on the loop's own thread."""
        self._stopping = True
        self._mailbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the loop's thread; the future holds its result or exception, Unavailable after `stop`."""
        result: Future[T] = Future()
        self._mailbox.put(Call(function, result))
        if self._ended.is_set():
            self._refuse_calls()
        return result

    def _refuse_calls(self) -> None:
        """Nobody runs calls any more: answer those that wait. Called by whoever sees that first; twice is harmless."""
        while (item := self._mailbox.get(0)) is not None:
            if isinstance(item, Call) and item.result.set_running_or_notify_cancel():
                item.result.set_exception(Unavailable("the engine is stopped"))

    def run(self) -> None:
        """Drive the engine until `stop`."""
        try:
            self._run()
        finally:
            self._ended.set()
            self._refuse_calls()

    def _run(self) -> None:
        while not self._stopping:
            item = self._mailbox.get(self._patience_s())
            try:
                while item is not None:
                    self._take(item)
                    item = self._mailbox.get(0)
                self._cancel_expired()
                self._engine.advance()
                self._engine.flush()
            except Exception as error:  # a bug, but nobody may wait for ever because of it
                self._fail(f"the coordinator failed: {type(error).__name__}")
            self._progress += 1

    def _fail(self, reason: str) -> None:
        """Serve nobody from now on. Ingresses find this coordinator silent, and take their requests to the next one."""
        log.exception("%s; its books cannot be trusted any more", reason)
        self._ingresses.close()
        try:
            self._engine.abandon(reason)
            self._engine.flush()
        except Exception:  # what failed before may fail again; calls are to be answered all the same
            log.exception("the coordinator cannot even tell its requests that it failed")

    def _patience_s(self) -> float | None:
        deadlines = [each for each in (self._engine.deadline_s, self._ingresses.deadline_s) if each is not None]
        if not deadlines:
            return None
        return min(max(0.0, min(deadlines) - time.monotonic()) + 1e-4, _LONGEST_WAIT_S)

    def _cancel_expired(self) -> None:
        for owner in self._ingresses.expired():
            self._engine.cancel_owner(owner)

    def _take(self, item: object) -> None:
        match item:
            case Arrived(peer=peer) | PeerLost(peer=peer) if peer in WORKERS:
                self._engine.receive(item)
            case Arrived():
                self._take_request(item)
            case PeerLost(peer=peer, life=life, gone=gone):
                self._ingresses.lost(peer, life, gone=gone)
            case Call():
                self._call(item)
            case _:
                log.warning("dropped an item that the coordinator does not understand: %s", type(item).__name__)

    def _take_request(self, item: Arrived) -> None:
        if not self._ingresses.current(item.peer, item.life):
            self._engine.drop("old_life")
            return
        match item.message:
            case Submit(request=request, before=before):
                self._submit(request, item.peer, before)
            case Cancel(id=request_id):
                self._engine.cancel(request_id)
            case message:
                log.warning("dropped a %s, which no ingress sends", type(message).__name__)

    def _submit(self, request: Request, owner: str, before: RequestStats | None) -> None:
        try:
            self._engine.submit(request, owner, before)
        except SpecserveError as error:
            self._refuse(owner, request, Failure.of(error))
        except Exception as error:
            if request.id in self._engine.requests_of(owner):
                raise
            log.exception("a request cannot be admitted because of a mistake in the coordinator")
            reason = f"the request cannot be admitted: {type(error).__name__}"
            self._refuse(owner, request, Failure(SpecserveError.status, SpecserveError.code, reason))

    def _refuse(self, owner: str, request: Request, failure: Failure) -> None:
        self._engine.refuse(owner, Delta(request.id, (), finish="error", failure=failure))

    def welcome(self, name: str, life: int, cursor: int, open_line: Callable[[], Line]) -> list[str] | None:
        """Connect an ingress, on the loop's thread; see `Ingresses.connect`.

        Returns the requests that need not be sent again, for they run or what ended them is on its way; None where the
        session is new. Raises Unavailable when the engine has failed, and the next one is to be waited for.
        """
        if self._engine.health().status == "dead":
            raise Unavailable("the coordinator failed, and is being replaced")
        known = self._ingresses.knows(name, cursor)
        if not known:
            self._engine.cancel_owner(name)
        self._engine.flush()  # what ended is told of in the session before, not in a new one
        ended = self._ingresses.connect(name, life, cursor, open_line)
        self._engine.tell_places(name)
        return self._engine.requests_of(name) + ended if known else None

    def _call(self, call: Call) -> None:
        if not call.result.set_running_or_notify_cancel():
            return
        try:
            call.result.set_result(call.run())
        except BaseException as error:
            call.result.set_exception(error)
