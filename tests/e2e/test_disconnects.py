"""Clients that vanish leave nothing behind."""

from __future__ import annotations

import socket
import threading
import time

import httpx
import pytest
from http_server import serving
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


def kill_in_mid_stream(url, after):
    """Open a streaming request with a plain socket and drop the connection after `after` bytes."""
    host, port = url.removeprefix("http://").split(":")
    body = b'{"prompt": "hello", "max_tokens": 400, "stream": true, "ignore_eos": true, "temperature": 1}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        seen = 0
        while seen < after and (piece := connection.recv(4096)):
            seen += len(piece)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def test_fifty_killed_streams_release_everything_within_two_seconds(server):
    """After 50 streaming clients die at different moments, no slot, block or request is held."""
    engine, url = server
    threads = [threading.Thread(target=kill_in_mid_stream, args=(url, 200 * (n % 12))) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        levels = engine.levels()
        held = levels.running + levels.waiting + levels.slots_held + levels.target_blocks_held
        if held + levels.draft_blocks_held == 0:
            break
        time.sleep(0.02)

    assert held + levels.draft_blocks_held == 0
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "still there", "max_tokens": 3}).status_code == 200
