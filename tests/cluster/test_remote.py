"""An ingress's engine on real sockets, with a coordinator that is no more than its end of the way."""

from __future__ import annotations

import asyncio

import pytest

from specserve import config as configs
from specserve.cluster.ingress_line import Welcome
from specserve.cluster.remote import Pipe, RemoteEngine
from specserve.errors import Unavailable
from specserve.transport import Mailbox
from specserve.transport.messages import Reconnect
from specserve.transport.socket import Address, Endpoint
from specserve.types import ModelCard, Request, RequestId

CARD = ModelCard("m", 0, 64, 97, 0, "none")


async def nothing(*_: object) -> None:
    """Of the control plane, what this test has no use for."""


@pytest.mark.parametrize("known", [None, ()])
def test_a_way_that_always_breaks_again_is_given_up(known):
    """Each connection is made, and lost before anything comes: the request ends after engine.recovery_wait_s."""
    there = Endpoint(Mailbox())
    connections = []

    async def connect(name: str, address: Address, cursor: int) -> Welcome:
        connections.append(address)
        there.connect(address).send(Reconnect())
        return Welcome("engine", there.accept(name, address.life), CARD, known)

    async def run() -> None:
        config = configs.parse({"engine": {"recovery_wait_s": 0.5}})
        pipe = Pipe(connect, nothing, nothing, nothing, nothing, nothing, nothing)
        engine = RemoteEngine(config, pipe, host=None, node_id="")
        try:
            await engine.connect()
            answer = aiter(engine.stream(Request(RequestId("r"), (1, 2, 3), 4)))
            with pytest.raises(Unavailable, match=r"did not come back within 0\.5 s"):
                await asyncio.wait_for(anext(answer), 30)
        finally:
            engine.close()
            there.close()

    asyncio.run(run())
    assert len(connections) > 3
