"""The coordinator as an actor: the engine's loop in one thread, channels to the workers and to every ingress."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from specserve import __version__, drafting, logs, model_sampling
from specserve import config as configs
from specserve.cluster.actors import in_control_group, node_address
from specserve.cluster.ingress_line import IngressLine, Welcome
from specserve.cluster.link import Echo, EchoAddress
from specserve.cluster.placement import DRAFT, TARGET
from specserve.cluster.ray_channel import RayChannel
from specserve.cluster.short_slices import short_slices
from specserve.coordinator.engine import Engine
from specserve.coordinator.ingresses import Ingresses
from specserve.coordinator.loop import Loop
from specserve.errors import Unavailable
from specserve.long_lived import made_to_last
from specserve.metrics import EngineMetrics, Snapshot
from specserve.models import vocabulary
from specserve.models.loading import prepare
from specserve.text import Tokenizer
from specserve.timeline import chrome_trace
from specserve.tracing import tracer_of
from specserve.transport import Channel, PeerLost
from specserve.transport.socket import Address, Endpoint, SocketMailbox
from specserve.types import Delta, Failure, Health, ModelCard, Sampling, WorkerInfo

log = logging.getLogger(__name__)

_ROLES = frozenset({TARGET, DRAFT})

T = TypeVar("T")

_CLEAN_END_S = 5.0
_ASK_S = 1.0
_WELCOME_S = 10.0
NEWS_S = 1.0
"""How long the supervisor's question for news may wait; the pipeline's load, as others see it, is as old."""

_LOOK_S = 0.25
_SENDING_S = 0.25  # for the last words to leave; a channel that closes drops what it still holds


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker that is ready to be talked to. `address` is None for the ray transport, which uses `handle`."""

    info: WorkerInfo
    life: int
    address: Address | None
    handle: Any


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """What the supervisor asks for. `rounds` counts verifications.

    lost holds the roles whose present life is over; those in hung were given up though their hearts beat: they took too
    long for a batch, or broke the protocol, and their processes are not to be used again.
    """

    pid: int
    started: bool
    health: Health
    lost: tuple[str, ...]
    hung: tuple[str, ...]
    rounds: int


class _WatchedMailbox(SocketMailbox):
    """Keeps a note of every lost worker on its way to the loop, for the supervisor."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, PeerLost] = {}

    def put(self, item: object) -> None:
        if isinstance(item, PeerLost):
            log.warning("lost %s (life %d): %s", item.peer, item.life, item.reason)
            if item.peer in _ROLES:
                self.losses[item.peer] = item
        super().put(item)


class CoordinatorActor:
    """Owner of one engine. A restarted process is empty until `start` is called again."""

    def __init__(self, config_tree: dict[str, Any]) -> None:
        self._config = configs.parse(config_tree)
        logs.configure(self._config.log_format)
        self._mailbox = _WatchedMailbox()
        node_id, host = node_address()
        lost_after_s = self._config.cluster.lost_after_s
        self._endpoint = Endpoint(self._mailbox, host=host, node_id=node_id, lost_after_s=lost_after_s)
        self._metrics = EngineMetrics(self._config.served_name, self._config.engine.depth, self._config.observe.slo)
        self._metrics.configured(self._config, __version__)
        self._tracer = tracer_of(self._config.observe.tracing, "coordinator")
        self._ingresses = Ingresses(time.monotonic, lost_after_s)
        self._engine: Engine | None = None
        self._engine_name = ""
        self._loop: Loop | None = None
        self._card: ModelCard | None = None
        self._stopping = False

    def accept(self, role: str, life: int) -> Address | None:
        """Where a worker of this role and life may send to; None for the ray transport."""
        if self._config.cluster.transport == "ray":
            return None
        return self._endpoint.accept(role, life)

    def echo(self) -> EchoAddress:
        """Where a worker may measure how far away it is, once, within a few seconds."""
        node_id, host = node_address()
        return Echo(host, node_id).address

    def start(self, target: Joined, draft: Joined | None) -> ModelCard:
        """Make the engine and begin to serve. Raises ConfigError when the workers' limits do not fit.

        An engine that is here already, in a process that was given up but lives on, ends first. Its ingresses hear
        nothing of that: they find it silent, and bring their requests to the new one.
        """
        self._end_engine(None)
        self._ingresses = Ingresses(time.monotonic, self._config.cluster.lost_after_s)
        with made_to_last():
            folder = prepare(self._config.target, log.info, role="target")
            sampling = model_sampling.read(folder)
            engine = self._make_engine(folder, target, draft)
        loop = Loop(engine, self._mailbox, self._ingresses)
        with short_slices():
            loop.start()
        self._engine, self._loop, self._engine_name = engine, loop, uuid.uuid4().hex
        self._card = self._make_card(target.info, draft, sampling)
        return self._card

    def _make_engine(self, folder: Path, target: Joined, draft: Joined | None) -> Engine:
        """folder is the target's."""
        if draft is not None:
            draft_folder = prepare(self._config.draft_model, log.info, role="draft")
            vocabulary.check(folder, draft_folder, target.info.vocab_size, draft.info.vocab_size)
        # These belong to lives before this engine.
        self._mailbox.losses.clear()
        return Engine(
            self._config,
            target=target.info,
            draft=None if draft is None else draft.info,
            verifier=self._channel(TARGET, target),
            drafter=None if draft is None else self._channel(DRAFT, draft),
            guesser=drafting.guesser_of(self._config.draft),
            guessers=drafting.guessers_of(self._config.draft),
            tokenizer=Tokenizer.load(folder),
            metrics=self._metrics,
            sink=self._deliver,
            life=target.life,
            draft_life=0 if draft is None else draft.life,
            tracer=self._tracer,
            place_sink=self._ingresses.place,
        )

    def _make_card(self, target: WorkerInfo, draft: Joined | None, sampling: Sampling) -> ModelCard:
        lengths = [target.context_length] + ([] if draft is None else [draft.info.context_length])
        return ModelCard(
            name=self._config.served_name,
            created=int(time.time()),
            context_length=lengths[0],
            vocab_size=target.vocab_size,
            max_depth=self._config.engine.depth,
            speculator=self._config.draft.speculator,
            rules=target.rules,
            sources=drafting.sources_of(self._config.draft, self._config.engine.depth),
            sampling=sampling,
        )

    def _channel(self, role: str, joined: Joined) -> Channel:
        if joined.address is None:
            return RayChannel(joined.handle, self._mailbox, role, joined.life, self._endpoint.traffic)
        self._endpoint.expect(role)
        channel = self._endpoint.connect(joined.address, role)
        self._endpoint.watch(channel, role, joined.life)
        return channel

    def attach(self, role: str, joined: Joined) -> None:
        """A restarted worker joins the running engine."""
        loop, engine = self._running()
        channel = self._channel(role, joined)

        def attach() -> None:
            # Both at once: a worker that is neither lost nor there would be taken for one that hangs.
            engine.attach(role, channel, joined.life, joined.info)
            loss = self._mailbox.losses.get(role)
            if loss is not None and loss.life < joined.life:
                del self._mailbox.losses[role]

        loop.call(attach).result()

    def connect_ingress(self, name: str, there: Address, cursor: int) -> Welcome:
        """Connect an ingress that has all deltas up to `cursor`, for the first time or again. Raises Unavailable.

        name is the ingress's for as long as it lives; the life of the address counts its connections.
        """
        loop, _ = self._running()
        return loop.call(lambda: self._welcome(loop, name, there, cursor)).result(timeout=_WELCOME_S)

    def _welcome(self, loop: Loop, name: str, there: Address, cursor: int) -> Welcome:
        lines: list[IngressLine] = []

        def open_line() -> IngressLine:
            lines.append(IngressLine(self._endpoint, name, there, self._config.cluster.heartbeat_s))
            return lines[0]

        known = loop.welcome(name, there.life, cursor, open_line)
        assert self._card is not None
        return Welcome(self._engine_name, lines[0].here, self._card, None if known is None else tuple(known))

    def _running(self) -> tuple[Loop, Engine]:
        if self._loop is None or self._engine is None:
            raise Unavailable("the coordinator is starting")
        return self._loop, self._engine

    def _end_engine(self, reason: str | None) -> None:
        """Tell every open request why it ends, or with no reason fall silent to their ingresses; then end the loop."""
        if self._loop is None or self._engine is None:
            return
        loop, engine, ingresses = self._loop, self._engine, self._ingresses
        self._loop = self._engine = None
        try:
            loop.call(ingresses.close if reason is None else lambda: engine.abandon(reason)).result(_CLEAN_END_S)
        except TimeoutError:
            log.warning("the engine's loop does not answer; its requests end without a word")
        loop.stop()

    def _deliver(self, owner: str, deltas: tuple[Delta, ...]) -> None:
        if self._stopping:
            deltas = tuple(map(_as_unavailable, deltas))
        self._ingresses.deliver(owner, deltas)

    # ---- what the supervisor asks -------------------------------------------------------------------------------

    @in_control_group
    def state(self, seen: CoordinatorState | None = None) -> CoordinatorState:
        """Cheap, never raises. Who has seen a state is answered when a worker is lost or back, or after `NEWS_S`.

        A call costs both processes milliseconds, and looking here next to nothing.
        """
        until_s = time.monotonic() + NEWS_S
        while seen is not None and self._absences() == (seen.started, seen.lost, seen.hung):
            failed = self._engine is not None and self._engine.dead
            if failed or time.monotonic() >= until_s:
                break
            time.sleep(_LOOK_S)
        health = self._health()  # takes a moment, in which a worker may come back
        started, lost, hung = self._absences()
        rounds = (self._endpoint.progress(TARGET) or (0, False))[0]
        return CoordinatorState(os.getpid(), started, health, lost, hung, rounds)

    def _absences(self) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
        """Whether there is an engine, and the workers that it misses: all of them, and those that it gave up itself."""
        engine = self._engine
        silent = _ROLES & self._mailbox.losses.keys()
        hung = set() if engine is None else set(engine.away) - silent
        return engine is not None, tuple(sorted(silent | hung)), tuple(sorted(hung))

    def _health(self) -> Health:
        loop, engine = self._loop, self._engine
        if loop is None or engine is None:
            return Health("starting", "the coordinator is starting")
        try:
            return loop.call(engine.health).result(timeout=5)
        except TimeoutError:
            return Health("dead", "the engine's loop does not answer")
        except Unavailable:  # it ended meanwhile
            return Health("starting", "the coordinator is starting")

    def metrics(self) -> Snapshot:
        """Every sample of this process."""
        self._metrics.network(*self._endpoint.traffic.totals())
        self._ask(lambda engine: engine.activity.settle())
        return self._metrics.snapshot()

    def status(self) -> dict[str, Any]:
        """What the status page shows."""
        return self._metrics.status()

    def timeline(self) -> dict[str, Any]:
        """The last rounds on both devices, as a trace."""
        spans = self._ask(lambda engine: engine.activity.spans)
        return chrome_trace(spans or [], self._config.served_name)

    def _ask(self, question: Callable[[Engine], T]) -> T | None:
        """Ask on the engine's own thread; None when there is no engine, or it is too busy to answer."""
        if self._loop is None or self._engine is None:
            return None
        engine = self._engine
        with contextlib.suppress(TimeoutError, Unavailable):
            return self._loop.call(lambda: question(engine)).result(timeout=_ASK_S)
        return None

    def drain(self) -> None:
        """Take no new requests."""
        loop, engine = self._running()
        loop.call(engine.drain).result()

    def stop(self) -> None:
        """End what is still open with a failure, then the loop and every thread. The actor is of no use afterwards."""
        self._stopping = True
        self._end_engine("the server is shutting down")
        time.sleep(_SENDING_S)
        self._ingresses.close()
        self._endpoint.close()
        if self._tracer is not None:
            self._tracer.close()


def _as_unavailable(delta: Delta) -> Delta:
    """The end of the server is nobody's mistake: clients are told that another try elsewhere makes sense."""
    if delta.failure is None:
        return delta
    return replace(delta, failure=Failure(Unavailable.status, Unavailable.code, delta.failure.message))
