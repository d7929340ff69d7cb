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
from specserve.errors import SpecserveError, Unavailable
from specserve.transport import Arrived, Mailbox, PeerLost
from specserve.transport.messages import Cancel, Submit
from specserve.types import Delta, Failure, Request

log = logging.getLogger("specserve.coordinator")

WORKERS = ("target", "draft")
"""Peers with these names are workers; every other peer is an ingress."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A function to run on the loop's thread."""

    run: Callable[[], Any]
    result: Future[Any]


class Loop:
    """Owns the thread side of one engine. `run` in a thread of your own, or `start` for one made here."""

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox
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
                self._engine.advance()
                self._engine.flush()
            except Exception as error:  # a bug, but nobody may wait for ever because of it
                log.exception("the coordinator failed; every request ends and new ones are refused")
                self._engine.abandon(f"the coordinator failed: {type(error).__name__}")
                self._engine.flush()
            self._progress += 1

    def _patience_s(self) -> float | None:
        deadline = self._engine.deadline_s
        return None if deadline is None else max(0.0, deadline - time.monotonic()) + 1e-4

    def _take(self, item: object) -> None:
        match item:
            case Arrived(peer=peer) if peer in WORKERS:
                self._engine.receive(item)
            case Arrived(peer=peer, message=Submit(request=request)):
                self._submit(request, peer)
            case Arrived(message=Cancel(id=request_id)):
                self._engine.cancel(request_id)
            case PeerLost(peer=peer) if peer in WORKERS:
                self._engine.receive(item)
            case PeerLost(peer=peer):
                self._engine.cancel_owner(peer)
            case Call():
                self._call(item)
            case _:
                log.warning("dropped an item that the coordinator does not understand: %s", type(item).__name__)

    def _submit(self, request: Request, owner: str) -> None:
        try:
            self._engine.submit(request, owner)
        except SpecserveError as error:
            failure = Failure(error.status, error.code, error.message)
            self._engine.refuse(owner, Delta(request.id, (), finish="error", failure=failure))

    def _call(self, call: Call) -> None:
        if not call.result.set_running_or_notify_cancel():
            return
        try:
            call.result.set_result(call.run())
        except BaseException as error:
            call.result.set_exception(error)
