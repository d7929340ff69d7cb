"""Thin shells that make actors of the plain classes. Control comes by actor calls, data by the channels."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import ray

from specserve import config as configs
from specserve import logs
from specserve.cluster.link import EchoAddress, Link, measure
from specserve.cluster.placement import DRAFT, TARGET
from specserve.cluster.ray_channel import Frames, to_bytes
from specserve.cluster.session import WorkerSession
from specserve.errors import ProtocolError
from specserve.models import _memory_plan
from specserve.models.loading import prepare
from specserve.models.vocabulary import token_ids
from specserve.transport import Worker
from specserve.transport.messages import unpack
from specserve.transport.socket import Address
from specserve.types import WorkerInfo

log = logging.getLogger(__name__)

CONTROL = "control"
"""Calls of this concurrency group are answered while others compute."""

Method = TypeVar("Method", bound=Callable[..., object])

_BUILDERS = {TARGET: "specserve.verification.verifier", DRAFT: "specserve.drafting.worker"}


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker actor tells about itself: its process, whether a model is loaded, what it is doing."""

    pid: int
    loaded: bool
    progress: str


def node_address() -> tuple[str, str]:
    """(node id, IP address) of the node that this actor runs on."""
    context = ray.get_runtime_context()
    return context.get_node_id(), ray.util.get_node_ip_address()


def _in_control_group(method: Method) -> Method:
    marked: Method = ray.method(concurrency_group=CONTROL)(method)
    return marked


class WorkerActor:
    """Holds one model for one role. `load` and `connect` take turns; `state` answers at any time."""

    def __init__(self, role: Literal["target", "draft"], config_tree: dict[str, Any]) -> None:
        self._role = role
        self._config = configs.parse(config_tree)
        logs.configure(self._config.log_format)
        self._model = self._config.target if role == TARGET else self._config.draft_model
        self._progress = "starting"
        self._folder: Path | None = None
        self._worker: Worker | None = None
        self._info: WorkerInfo | None = None
        self._session: WorkerSession | None = None
        self._life = -1

    @_in_control_group
    def state(self) -> WorkerState:
        """Cheap; answers while a model loads."""
        return WorkerState(os.getpid(), self._info is not None, self._progress)

    def load(self) -> WorkerInfo:
        """Prepare and load the model, once. Raises ConfigError when the model cannot be served as configured."""
        if self._info is None:
            self._folder = prepare(self._model, self._report, role=self._role)
            self._report("loading weights")
            self._worker, self._info = importlib.import_module(_BUILDERS[self._role]).build(self._config)
            self._report(f"ready on {self._info.device}: {_memory_plan.line(self._info.memory)}")
        return self._info

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
        node_id, host = node_address()
        heartbeat_s = self._config.cluster.heartbeat_s
        self._session = WorkerSession(
            self._worker, coordinator, life, host=host, node_id=node_id, heartbeat_s=heartbeat_s
        )
        return self._session.address

    def link_to(self, echo: EchoAddress) -> Link | None:
        """How far the coordinator's node is; None when it is this one. Raises Unavailable."""
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
    """The target model."""

    def __init__(self, config_tree: dict[str, Any]) -> None:
        super().__init__("target", config_tree)


class DraftActor(WorkerActor):
    """The draft model."""

    def __init__(self, config_tree: dict[str, Any]) -> None:
        super().__init__("draft", config_tree)


WORKER_ACTORS: dict[str, Callable[..., WorkerActor]] = {TARGET: VerifierActor, DRAFT: DraftActor}
