"""Clients that vanish leave nothing behind."""

from __future__ import annotations

import time

import httpx
import pytest
from http_server import serving
from killed_clients import kill_fifty
from tiny_models import tiny_llama

from specserve.local import LocalEngine


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target, draft = tiny_llama(root / "target", seed=1), tiny_llama(root / "draft", seed=2, layers=1)
    config = {
        "target": {"source": str(target), "kv_memory_gib": 0.05},
        "draft": {"model": {"source": str(draft), "kv_memory_gib": 0.05}},
        "engine": {"depth": 4, "max_requests": 16, "max_batch_tokens": 128, "prefill_chunk": 32},
    }
    with LocalEngine(config) as engine, serving(engine) as url:
        yield engine, url


def test_fifty_killed_streams_release_everything_within_two_seconds(server):
    """After 50 streaming clients die at different moments, no slot, block or request is held."""
    engine, url = server
    kill_fifty(url)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        levels = engine.levels()
        held = levels.running + levels.waiting + levels.slots_held + levels.target_blocks_held
        if held + levels.draft_blocks_held == 0:
            break
        time.sleep(0.02)

    assert held + levels.draft_blocks_held == 0
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "still there", "max_tokens": 3}).status_code == 200
