"""Thin shells that make actors of the plain classes. Control comes by actor calls, data by the channels."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import ray

from specserve import config as configs
from specserve import logs
from specserve.cluster.giving_way import giving_way
from specserve.cluster.link import Echo, EchoAddress, Link, measure
from specserve.cluster.placement import DRAFT, TARGET
from specserve.cluster.ray_channel import Frames, to_bytes
from specserve.cluster.session import WorkerSession
from specserve.cluster.short_slices import short_slices
from specserve.config import EngineConfig
from specserve.errors import GroupLost, ProtocolError
from specserve.long_lived import made_to_last
from specserve.models import _memory_plan
from specserve.models.vocabulary import token_ids
from specserve.transport import Worker
from specserve.transport.messages import unpack
from specserve.transport.socket import Address
from specserve.types import WorkerInfo

if TYPE_CHECKING:
    from specserve.models import Backend
    from specserve.models._ranks import Meeting, MeetingPlace, RankGroup

log = logging.getLogger(__name__)

CONTROL = "control"
"""Calls of this concurrency group are answered while others compute."""

Method = TypeVar("Method", bound=Callable[..., object])

_BUILDERS = {TARGET: "specserve.verification.verifier", DRAFT: "specserve.drafting.worker"}


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker actor tells about itself: its process, whether a model is loaded, what it is doing.

    fresh: nothing was asked of it yet, so it can join a new group.
    """

    pid: int
    loaded: bool
    progress: str
    fresh: bool = False


def in_control_group(method: Method) -> Method:
    """Mark a method of an actor whose calls are answered while others compute."""
    marked: Method = ray.method(concurrency_group=CONTROL)(method)
    return marked


def node_address() -> tuple[str, str]:
    """(node id, IP address) of the node that this actor runs on."""
    context = ray.get_runtime_context()
    return context.get_node_id(), ray.util.get_node_ip_address()


class WorkerActor:
    """Holds one model for one role, or rank's part of it. `load` and `connect` take turns; `state` answers at any time.

    Of several ranks only rank 0 is connected to; the others compute what it tells them.
    """

    def __init__(self, role: Literal["target", "draft"], config_tree: dict[str, Any], rank: int = 0) -> None:
        self._role = role
        self._rank = rank
        self._config = configs.parse(config_tree)
        logs.configure(self._config.log_format)
        self._model = self._config.target if role == TARGET else self._config.draft_model
        self._progress = "starting"
        self._begun = False
        self._place: MeetingPlace | None = None
        self._ranks: RankGroup | None = None
        self._folder: Path | None = None
        self._worker: Worker | None = None
        self._info: WorkerInfo | None = None
        self._session: WorkerSession | None = None
        self._life = -1

    @property
    def _limits(self) -> EngineConfig:
        """What the worker must hold at once."""
        return self._config.engine

    @in_control_group
    def state(self) -> WorkerState:
        """Cheap; answers while a model loads."""
        broken = self._ranks is not None and self._ranks.broken is not None
        return WorkerState(os.getpid(), self._info is not None and not broken, self._progress, not self._begun)

    def meet(self) -> Meeting:
        """Where the other ranks find this one, rank 0, when they load."""
        from specserve.models._ranks import MeetingPlace

        self._begun = True
        if self._place is None:
            _, host = node_address()
            self._place = MeetingPlace(host, self._config.cluster.start_timeout_s)
        return self._place.meeting

    def load(self, meeting: Meeting | None = None) -> WorkerInfo:
        """Prepare and load the model, once. Of several ranks each is given rank 0's meeting, and waits for the others.

        Raises ConfigError when the model cannot be served as configured, and GroupLost when a rank is lost meanwhile.
        """
        self._begun = True
        if self._info is None:
            with made_to_last():
                # The threads through which ranks talk are made while they load, and stay as they are made.
                info = giving_way(self._load) if meeting is None else self._load(meeting)
            self._report(f"ready on {info.device}: {_memory_plan.line(info.memory, info.quantization)}")
            self._info = replace(info, process=uuid.uuid4().hex)
        return self._info

    def _load(self, meeting: Meeting | None = None) -> WorkerInfo:
        """What takes a core for seconds, torch's own import above all: see `giving_way`."""
        from specserve.models.loading import prepare

        self._folder = prepare(self._model, self._report, role=self._role)
        if meeting is not None:
            self._report("meeting the other ranks")
            self._ranks = self._met(meeting)
        self._report("loading weights")
        return self._loaded(self._ranks)

    def _met(self, meeting: Meeting) -> RankGroup:
        from specserve.models._ranks import RankGroup, arrive
        from specserve.models.loading import device_of

        timeout_s = self._config.cluster.start_timeout_s
        if (self._rank == 0) != (self._place is not None):
            raise GroupLost(f"rank {self._rank} of the {self._role} is asked to join a group of another process")
        store = arrive(meeting, timeout_s) if self._place is None else self._place.store
        _, host = node_address()
        return RankGroup(
            store,
            self._rank,
            self._model.tensor_parallel,
            host=host,
            device=device_of(self._model),
            hang_after_s=self._config.engine.hang_after_s,
        )

    def _loaded(self, ranks: RankGroup | None) -> WorkerInfo:
        if ranks is None or self._rank == 0:
            return self._built(ranks)
        from specserve.models._worker import load_backend

        part, info = load_backend(self._model, self._role, self._limits, ranks=ranks)
        threading.Thread(target=self._follow, args=(part, ranks), name="specserve-rank", daemon=True).start()
        return info

    def _built(self, ranks: RankGroup | None) -> WorkerInfo:
        self._worker, info = importlib.import_module(_BUILDERS[self._role]).build(self._config, ranks)
        return cast(WorkerInfo, info)

    def _follow(self, part: Backend, ranks: RankGroup) -> None:
        from specserve.models._tensor_parallel import follow

        try:
            follow(part, ranks)
        except Exception as error:  # whatever ends this rank ends its group
            ranks.broken = ranks.broken or f"{type(error).__name__}: {error}"
            self._report(f"its group is broken: {ranks.broken}")

    def echo(self) -> EchoAddress:
        """Where another rank may measure how far away this one is, once, within a few seconds."""
        node_id, host = node_address()
        return Echo(host, node_id).address

    def vocabulary(self) -> dict[str, int]:
        """Every token of the loaded model's tokenizer with its id. Raises ProtocolError before `load`."""
        if self._folder is None:
            raise ProtocolError(f"{self._role}: vocabulary before load")
        return token_ids(self._folder)

    def _report(self, text: str) -> None:
        self._progress = text
        log.info("%s: %s", self._role, text)

    def connect(self, coordinator: Address | None, life: int) -> Address | None:
        """Begin a new life towards a coordinator; None means that it will call `deliver` instead."""
        self.disconnect()
        self._life = life
        if self._worker is None:
            raise ProtocolError(f"{self._role}: connect before load")
        if coordinator is None:
            return None
        self._session = self._session_of(self._worker, coordinator, life)
        return self._session.address

    def _session_of(self, worker: Worker, coordinator: Address, life: int) -> WorkerSession:
        node_id, host = node_address()
        heartbeat_s = self._config.cluster.heartbeat_s
        return WorkerSession(worker, coordinator, life, host=host, node_id=node_id, heartbeat_s=heartbeat_s)

    def link_to(self, echo: EchoAddress) -> Link | None:
        """How far the node of this echo is; None when it is this one. Raises Unavailable."""
        node_id, host = node_address()
        return None if node_id == echo.node_id else measure(host, echo)

    def deliver(self, life: int, frames: Frames) -> list[Frames]:
        """The `ray` transport: handle one message and return the replies."""
        if life != self._life or self._worker is None:
            raise ProtocolError(f"{self._role}: a message of life {life}, this is life {self._life}")
        return [to_bytes(reply) for reply in self._worker.handle(unpack(frames))]

    def disconnect(self) -> None:
        """End the present life. The model stays loaded."""
        if self._session is not None:
            self._session.close()
            self._session = None


class VerifierActor(WorkerActor):
    """The target model, whose device is idle while its thread waits for a core."""

    def __init__(self, config_tree: dict[str, Any], rank: int = 0) -> None:
        super().__init__("target", config_tree, rank)

    def _session_of(self, worker: Worker, coordinator: Address, life: int) -> WorkerSession:
        with short_slices():
            return super()._session_of(worker, coordinator, life)


class DraftActor(WorkerActor):
    """The draft model."""

    def __init__(self, config_tree: dict[str, Any], rank: int = 0) -> None:
        super().__init__("draft", config_tree, rank)


WORKER_ACTORS: dict[str, Callable[..., WorkerActor]] = {TARGET: VerifierActor, DRAFT: DraftActor}
