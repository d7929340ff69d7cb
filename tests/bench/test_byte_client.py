"""The byte client: what it takes for an answer, however the bytes are cut, and what it does with connections."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from specserve.bench.byte_client import ByteClient, Heard
from specserve.errors import Unavailable

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Name: a: b\r\n\r\n"
    b"9\r\ndata: 1\n\n\r\na\r\ndata: 22\n\n\r\n0\r\n\r\n"
)
SIZED = b"HTTP/1.1 429 Too Many\r\ncontent-length: 5\r\nRetry-After: 7\r\n\r\nabcde"


@contextlib.asynccontextmanager
async def server(*answers: bytes, piece: int = 1 << 20, hang_up: bool = False):
    """A client of a server that gives these answers in turn, in pieces; and the requests of each connection."""
    asked: list[list[bytes]] = []
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies: list[bytes] = []
        asked.append(bodies)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                bodies.append(await reader.readexactly(length))
                answer = left.pop(0)
                for at in range(0, len(answer), piece):
                    writer.write(answer[at : at + piece])
                    await writer.drain()
                    await asyncio.sleep(0)
                if hang_up:
                    break
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening, ByteClient(f"http://127.0.0.1:{port}") as client:
        yield client, asked


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_answers_are_the_same_however_they_are_cut(piece):
    """Chunks and lengths, byte by byte and at once; one connection serves one request after the other."""

    async def run() -> tuple[list[Heard], list[list[bytes]]]:
        async with server(CHUNKED, SIZED, CHUNKED, piece=piece) as (client, asked):
            return [await client.post("/x", body) for body in (b"one", b"two", b"three")], asked

    (first, second, third), asked = asyncio.run(run())
    assert asked == [[b"one", b"two", b"three"]]
    assert (first.status, first.header("x-name"), first.whole) == (200, "a: b", True)
    assert first.body == b"data: 1\n\ndata: 22\n\n" == third.body
    assert [line for _, line in first.lines()] == [b"data: 1", b"data: 22"]
    assert (second.status, second.header("retry-after"), second.body) == (429, "7", b"abcde")


def test_times_are_those_of_the_bytes():
    """A line's time is that of the part that completes it."""
    heard = Heard(b"HTTP/1.1 200 OK", [(1.0, b"a\nb"), (2.0, b"c\n"), (3.0, b"\nd\n")], whole=True)
    assert heard.lines() == [(1.0, b"a"), (2.0, b"bc"), (3.0, b"d")]


def test_what_breaks_off_is_not_whole():
    """And its connection is not used again."""

    async def run() -> tuple[Heard, Heard, int]:
        async with server(CHUNKED[:-5], SIZED, hang_up=True) as (client, asked):
            return await client.post("/", b"x"), await client.post("/", b"y"), len(asked)

    broken, after, connections = asyncio.run(run())
    assert (broken.whole, after.whole, connections) == (False, True, 2)


def test_nobody_there_is_told():
    """No server, or one that says nothing."""

    async def nobody() -> None:
        async with server(b"", hang_up=True) as (client, _):
            with pytest.raises(Unavailable, match="without an answer"):
                await client.post("/", b"x")
        with pytest.raises(Unavailable, match="no connection"):
            await client.post("/", b"x")

    asyncio.run(nobody())


def test_many_requests_at_once_have_a_connection_each():
    """None waits for another one's."""

    async def run() -> list[list[bytes]]:
        async with server(*[SIZED] * 5) as (client, asked):
            await asyncio.gather(*(client.post("/", b"%d" % n) for n in range(5)))
            return asked

    assert sorted(asyncio.run(run())) == [[b"0"], [b"1"], [b"2"], [b"3"], [b"4"]]
