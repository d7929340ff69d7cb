"""Where Serve's replicas listen for calls of each other: at their node's own address, which is loopback on a local Ray.

Serve opens such a port in every replica, at all addresses of the machine, and reads pickles from whoever connects: who
reaches it can run code. Calls go by Ray's actors unless Serve is told otherwise, so nothing of ours needs the port.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.serve._private import replica

log = logging.getLogger(__name__)

_EVERYWHERE = "[::]"
_OPENER = "add_port_to_grpc_server"


def stay_at_the_node() -> None:
    """To be called in a replica's constructor, which comes before the port is opened. Idempotent."""
    opener = getattr(replica, _OPENER, None)
    if opener is None:  # another version of Ray, which opens its port in another way, or none
        log.warning("cannot bind the replica's own port to its node's address: this Ray has no %s", _OPENER)
        return
    if getattr(opener, "stays", False):
        return

    def open_at_the_node(server: Any, address: str) -> Any:
        host = ray.util.get_node_ip_address()
        return opener(server, address.replace(_EVERYWHERE, f"[{host}]" if ":" in host else host))

    open_at_the_node.stays = True  # type: ignore[attr-defined]
    setattr(replica, _OPENER, open_at_the_node)
