"""Clients that vanish in the middle of a stream."""

from __future__ import annotations

import json
import socket
import threading


def kill_in_mid_stream(url: str, after: int, tokens: int = 400) -> None:
    """Open a streaming request with a plain socket and reset the connection after `after` bytes."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(
        {"prompt": "hello", "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 1}
    ).encode()
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


def kill_fifty(url: str, tokens: int = 400) -> None:
    """Fifty of them at once, each at another moment, and wait until all are gone."""
    threads = [threading.Thread(target=kill_in_mid_stream, args=(url, 200 * (n % 12), tokens)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
