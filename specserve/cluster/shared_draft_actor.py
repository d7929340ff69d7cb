"""The draft worker that several pipelines share, as an actor: a session for each of their coordinators."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specserve.cluster.actors import DraftActor, in_control_group
from specserve.cluster.session import WorkerSession
from specserve.config import EngineConfig
from specserve.errors import ProtocolError
from specserve.transport.socket import Address
from specserve.types import WorkerInfo

if TYPE_CHECKING:
    from specserve.drafting._sharing import Turns
    from specserve.drafting.worker import DraftWorker
    from specserve.models._ranks import Meeting, RankGroup


class SharedDraftActor(DraftActor):
    """Shares are numbered from 0; what `load` says of blocks and memory is said of each."""

    _drafts: DraftWorker | None = None
    _turns: Turns | None = None
    _seats: dict[int, WorkerSession]

    @property
    def _pipelines(self) -> int:
        return self._config.cluster.pipelines_per_draft

    @property
    def _limits(self) -> EngineConfig:
        return self._config.engine.of_several(self._pipelines)

    def load(self, meeting: Meeting | None = None) -> WorkerInfo:
        """See `WorkerActor.load`."""
        from specserve.drafting import worker as draft_workers
        from specserve.drafting._sharing import Turns

        info = super().load(meeting)
        # Not made while loading: its thread, which computes, would give way for good.
        if self._drafts is not None and self._turns is None:
            self._turns = Turns(self._drafts, draft_workers.grammars_of(self._config))
        return info

    def _built(self, ranks: RankGroup | None) -> WorkerInfo:
        # Only the worker's process needs torch; keepers and launchers see this module, too.
        from specserve.drafting import worker as draft_workers
        from specserve.drafting._sharing import shares

        self._drafts, info = draft_workers.build(self._config, ranks, pipelines=self._pipelines)
        self._shares = shares(info.blocks, self._limits.slot_count, self._pipelines)
        self._seats = {}
        memory = {use: size // self._pipelines for use, size in info.memory.items()}
        weights = info.weights_bytes // self._pipelines
        return replace(info, blocks=len(self._shares[0].blocks), memory=memory, weights_bytes=weights)

    @in_control_group
    def computing_s(self) -> float:
        """How long the present turn takes by now."""
        return 0.0 if self._turns is None else self._turns.computing_s

    def seat(self, share: int, coordinator: Address, life: int) -> Address:
        """Begin a new life of a share towards a coordinator; whoever had it is heard no more. Raises ProtocolError."""
        if self._turns is None:
            raise ProtocolError("draft: a share is asked for before load")
        self.unseat(share)
        session = self._session_of(self._turns.tenant(self._shares[share]), coordinator, life)
        self._seats[share] = session
        return session.address

    def unseat(self, share: int) -> None:
        """End the present life of a share, if there is one, after the turn that is being computed."""
        if self._turns is not None and share in self._seats:
            self._seats.pop(share).close()
