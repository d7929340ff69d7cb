"""The real demo pair on real Ray: the target's own text over HTTP, and nothing left of clients that vanish."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import greedy_reference
import httpx
import pytest
from deployment import served
from killed_clients import kill_fifty
from prometheus_client.parser import text_string_to_metric_families

from specserve import config as configs
from specserve.bench.prompts import CHATS

pytestmark = [pytest.mark.ray, pytest.mark.demo]

TOKENS = 12
TEXTS = CHATS[:4] + CHATS[6:8]


@pytest.fixture(scope="module")
def url(ray_here):
    config = {"engine": {"depth": 4, "prefill_chunk": 48, "max_batch_tokens": 128, "max_requests": 8}}
    with served(configs.parse(config | {"server": {"port": 0}})) as address:
        yield address


def test_greedy_text_on_ray_is_transformers_own(url):
    """Six prompts, longer than the prefill chunk among them, all at once, with drafts and without."""
    expected = greedy_reference.generate(TOKENS, TEXTS)
    with ThreadPoolExecutor(6) as pool:
        drafted = list(pool.map(lambda text: greedy_reference.ask(url, text, 4, TOKENS), TEXTS))
    plain = [greedy_reference.ask(url, text, 0, TOKENS) for text in TEXTS[:2]]

    assert drafted == expected
    assert plain == expected[:2]


def held(url):
    """Requests, slots and blocks that the engine holds, from its metrics."""
    names = {"specserve_num_requests_running", "specserve_num_requests_waiting"}
    pools = {"specserve_slots", "specserve_kv_blocks"}
    total = 0.0
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name in names or (sample.name in pools and sample.labels["state"] == "held"):
                total += sample.value
    return total


def test_fifty_killed_streams_release_everything_within_two_seconds(url):
    """Through Serve's proxy as well: after 50 dead clients no request, slot or block is held."""
    kill_fifty(url, tokens=60)
    deadline = time.monotonic() + 2
    while held(url) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert held(url) == 0
