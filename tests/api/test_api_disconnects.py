"""A client that goes away: over real sockets and a real server, the engine's stream is closed at once."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn
from scripted_engine import ScriptedEngine, Step, app_of, said

from specserve.types import Delta, RequestId

ONE = Delta(RequestId(""), (60, 61, 62))


async def never() -> None:
    """Wait longer than any test."""
    await asyncio.sleep(3600)


async def shortly() -> None:
    """Let the server breathe between two deltas."""
    await asyncio.sleep(0.001)


@asynccontextmanager
async def served(engine: ScriptedEngine) -> AsyncIterator[int]:
    """A real server on a loopback port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)  # full buffers come sooner
    server = uvicorn.Server(uvicorn.Config(app_of(engine), log_level="critical", lifespan="off", ws="none"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def completion(**fields: object) -> bytes:
    """A completion request as it goes over the wire."""
    body = json.dumps({"prompt": "hi"} | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def post(port: int, **fields: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a completion request over a raw connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(completion(**fields))
    await writer.drain()
    return reader, writer


async def leave(writer: asyncio.StreamWriter) -> None:
    """Close the connection from the client's side."""
    writer.close()
    await writer.wait_closed()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


async def disconnects(port: int) -> dict[str, float]:
    """The server's own count of clients that left, by where they were."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    await leave(writer)
    found = re.findall(r'^specserve_client_disconnects_total\{stage="(\w+)"\} (\S+)', text, re.MULTILINE)
    assert {stage for stage, _ in found} == {"body", "waiting", "answer"}
    return {stage: float(count) for stage, count in found if float(count)}


@pytest.mark.parametrize("prompt", ["hi", ["hi", "ho"]], ids=["one", "two"])
def test_leaving_a_stream_closes_it_without_another_delta(prompt: object) -> None:
    """The engine waits for its next delta when the client leaves; it is closed there and then."""

    async def test() -> None:
        engine = ScriptedEngine([ONE, never, ONE])
        async with served(engine) as port:
            reader, writer = await post(port, stream=True, prompt=prompt)
            await reader.readuntil(b"data: ")
            before = engine.yielded
            await leave(writer)
            await engine.all_closed.wait()
            assert engine.yielded in {before, before + 1}
            assert len(engine.closed) == len(engine.requests)
            assert await disconnects(port) == {"answer": 1}

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_token_closes_the_stream(stream: bool) -> None:
    """A client that gives up in the queue frees its place, and is counted as one that waited."""

    async def test() -> None:
        engine = ScriptedEngine([never])
        async with served(engine) as port:
            _, writer = await post(port, stream=stream)
            while not engine.requests:
                await shortly()
            await leave(writer)
            await engine.all_closed.wait()
            assert await disconnects(port) == {"waiting": 1}

    run(test)


def test_leaving_before_the_body_was_sent_asks_nobody() -> None:
    """Half of a body, and the engine never hears of it."""

    async def test() -> None:
        engine = ScriptedEngine(said("x"))
        async with served(engine) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(completion()[:-4])
            await writer.drain()
            await leave(writer)
            while await disconnects(port) != {"body": 1}:
                await shortly()
            assert engine.requests == []

    run(test)


def test_leaving_a_whole_answer_closes_the_stream() -> None:
    """A request that is not streamed is cancelled too."""

    async def test() -> None:
        engine = ScriptedEngine([ONE, never])
        async with served(engine) as port:
            _, writer = await post(port)
            while not engine.yielded:
                await shortly()
            await leave(writer)
            await engine.all_closed.wait()
            assert await disconnects(port) == {"answer": 1}

    run(test)


def test_a_client_that_does_not_read_and_leaves_is_noticed() -> None:
    """Full buffers hold the engine's stream up instead of filling memory; when the client leaves it is closed."""

    async def test() -> None:
        engine = ScriptedEngine([Delta(RequestId(""), (60,) * 500), shortly] * 100_000)
        async with served(engine) as port:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
            await asyncio.get_running_loop().sock_sendall(client, completion(stream=True))
            before = -1
            while engine.yielded != before or not before:
                before = engine.yielded
                await asyncio.sleep(0.3)
            assert engine.closed == []
            client.close()
            await engine.all_closed.wait()

    run(test)


def test_a_storm_of_leaving_clients_leaves_nothing_behind() -> None:
    """Fifty streams abandoned at once are all closed."""

    async def test() -> None:
        script: list[Step] = [ONE, shortly] * 100_000
        engine = ScriptedEngine(script)
        async with served(engine) as port:
            clients = [await post(port, stream=True) for _ in range(50)]
            for reader, _ in clients:
                await reader.readuntil(b"data: ")
            for _, writer in clients:
                writer.transport.abort()
            while len(engine.closed) < 50:
                await shortly()
            assert await disconnects(port) == {"answer": 50}

    run(test)


def test_a_client_that_stays_gets_all_of_it() -> None:
    """Over a real socket a stream arrives whole, and the connection serves the next request."""

    async def test() -> None:
        engine = ScriptedEngine(said("Hel", "lo"))
        async with served(engine) as port:
            reader, writer = await post(port, stream=True)
            text = await reader.readuntil(b"0\r\n\r\n")
            assert text.count(b"data: ") == 4
            assert b"data: [DONE]\n\n" in text
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in await reader.read()
            await leave(writer)
            assert await disconnects(port) == {}

    run(test)
