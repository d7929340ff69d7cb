"""A pipeline that was deployed before the machines that it needs had joined."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specserve.cluster import placing
from specserve.cluster.pipeline import Pipeline

HEAD = {"Alive": True, "Resources": {"CPU": 4.0}}
DRAFT_NODE = {"Alive": True, "Resources": {"CPU": 4.0, "draft_node": 1000.0}}


@pytest.fixture
def nodes(monkeypatch) -> list[dict[str, Any]]:
    """What Ray says of its nodes; tests let them join and die."""
    found = [HEAD]
    monkeypatch.setattr(placing.ray, "nodes", lambda: found)
    monkeypatch.setattr(placing, "_NODES_POLL_S", 0.01)
    return found


def tree(wait_for_nodes_s: float) -> dict[str, Any]:
    return {
        "draft": {"model": {"resources": {"draft_node": 1}}},
        "cluster": {"wait_for_nodes_s": wait_for_nodes_s},
    }


def test_it_says_what_it_waits_for_and_goes_on_when_that_has_joined(nodes):
    """Health is `starting` with the numbers; a dead node is none; the placement is made on the nodes of that moment."""

    async def wait() -> None:
        waiting = Pipeline(tree(wait_for_nodes_s=60))
        nodes.append(DRAFT_NODE | {"Alive": False})
        await asyncio.sleep(0.05)
        health = await waiting.health()
        assert health.status == "starting"
        assert "waiting for nodes to join" in health.detail
        assert "1 draft_node" in health.detail
        await waiting.stop()  # what comes behind the placement needs a real Ray
        planned = asyncio.create_task(waiting._planned())
        await asyncio.sleep(0.05)
        assert not planned.done()
        nodes.append(DRAFT_NODE)
        assert (await planned).bundles[2] == {"CPU": 1.0, "draft_node": 1.0}

    asyncio.run(wait())


def test_it_gives_up_in_the_words_of_the_refusal(nodes):
    """After the time for it, and at once where there is none."""

    async def give_up(wait_for_nodes_s: float) -> None:
        hopeless = Pipeline(tree(wait_for_nodes_s))
        for _ in range(1000):
            state = await hopeless.state()
            if state.failure is not None:
                break
            await asyncio.sleep(0.01)
        assert "can never place this pipeline" in state.failure
        assert state.health.status == "dead"
        await hopeless.stop()

    asyncio.run(give_up(0.0))
    asyncio.run(give_up(0.1))
