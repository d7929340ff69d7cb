"""The request router that lets a call name its replica. Serve copies this module into processes: it holds no state."""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from specserve.cluster import fleet
from specserve.errors import Unavailable


class ByName(RequestRouter):  # type: ignore[misc]
    """Sends a call to the replica that its session names, and a call without a session to any."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve for every change."""
        super().update_replicas(replicas)
        fleet.told(self._deployment_id.app_name, self._deployment_id.name, [_name(one) for one in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Serve until the call has found its replica. A call to one that is gone raises Unavailable."""
        if pending_request is None or not pending_request.metadata.session_id:
            return [[random.choice(candidate_replicas)]]
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.metadata.session_id
        named = [one for one in candidate_replicas if _name(one) == wanted]
        if not named and not pending_request.future.done():
            pending_request.future.set_exception(Unavailable(f"replica {wanted} is gone"))
            # Serve forgets by itself what it has routed and what was cancelled, but not this.
            self._remove_pending_request_from_indices(pending_request)
        # Serve looks at a call that failed only when it is offered some replica.
        return [named or candidate_replicas[:1]]


def _name(replica: RunningReplica) -> str:
    name: str = replica.replica_id.unique_id
    return name
