"""Far more clients than places: each gets its answer or a 429 with a time to come back, and then all is as before."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest
from http_server import serving

from specserve import config as configs
from specserve.local import LocalEngine
from specserve.models import _device_profile

PLACES = 64
QUEUE = 64
TOKENS = 6
PROFILE = "llama-8b-1b-h100"
MODEL = f"emulated-{PROFILE}"


@pytest.fixture(scope="module")
def engine():
    settings = _device_profile.settings(PROFILE)
    settings |= {"engine.max_requests": PLACES, "engine.queue_limit": QUEUE, "engine.depth": 2}
    with LocalEngine(configs.parse(configs.override({}, settings))) as engine:
        yield engine


@pytest.mark.parametrize("clients", [250, pytest.param(500, marks=pytest.mark.full)])
def test_many_clients_against_64_places(engine, clients):
    """All are answered: as many as have places and queue at least by text, the rest by a 429 that says when to come."""

    async def run(url: str) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(ask(client, n) for n in range(clients)))

    with serving(engine) as url:
        replies = asyncio.run(run(url))
        assert engine.levels().running == engine.levels().waiting == 0
        again = httpx.post(f"{url}/v1/completions", json=body(0), timeout=60)
    codes = Counter(reply.status_code for reply in replies)
    assert codes.keys() <= {200, 429}
    assert codes[200] >= PLACES + QUEUE
    assert codes[429] > 0
    for reply in replies:
        if reply.status_code == 200:
            assert reply.json()["usage"]["completion_tokens"] == TOKENS
        else:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "queue_full"
    assert again.status_code == 200
    levels = engine.levels()
    assert levels.slots_held == levels.target_blocks_held == levels.draft_blocks_held == 0


def body(number: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": f"Client number {number}", "max_tokens": TOKENS, "temperature": 0}


async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response:
    return await client.post("/v1/completions", json=body(number))
