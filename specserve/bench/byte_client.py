"""Requests to a server at next to no cost: bytes out, bytes in with the time when they came, read when all is over.

A load's clients share the cores with what they measure, and hundreds of them that parse every event as it comes are a
load of their own. Speaks what servers answer such requests with: HTTP/1.1, chunked or with a length.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from specserve.errors import Unavailable

_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_HEAD_END: Final = b"\r\n\r\n"
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(slots=True)
class Heard:
    """An answer as it came. times are seconds of `perf_counter`; whole tells whether its end came."""

    head: bytes = b""
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    whole: bool = False

    @property
    def status(self) -> int:
        """The HTTP status."""
        return int(self.head.split(b" ", 2)[1])

    def header(self, name: str) -> str:
        """A header's value, empty where there is none."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.decode("latin-1").lower() == name:
                return value.decode("latin-1").strip()
        return ""

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(part for _, part in self._plain())

    def lines(self) -> list[tuple[float, bytes]]:
        """The lines of an answer of events, each with the time when its end came."""
        found, rest = [], b""
        for when, part in self._plain():
            *whole, rest = (rest + part).split(b"\n")
            found += [(when, line) for line in whole if line]
        return found

    def _plain(self) -> list[tuple[float, bytes]]:
        """The parts without what frames chunks."""
        if self.header("transfer-encoding").lower() != "chunked":
            return self.parts
        found, rest = [], b""
        for when, part in self.parts:
            rest += part
            while (chunk := _first_chunk(rest)) is not None:
                data, rest = chunk
                found.append((when, data))
        return found


def _first_chunk(raw: bytes) -> tuple[bytes, bytes] | None:
    """The first chunk and what follows it; None where it is not all there."""
    size, there, rest = raw.partition(b"\r\n")
    if not there:
        return None
    length = int(size.split(b";")[0], 16)
    return (rest[:length], rest[length + 2 :]) if len(rest) >= length + 2 else None


class _Line(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self._heard = Heard()
        self._done: asyncio.Future[Heard] | None = None
        self._transport: asyncio.Transport | None = None
        self._wanted: int | None = None
        self._tail = b""
        self.open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def ask(self, request: bytes) -> Heard:
        """Send a request and wait for the end of its answer, or of the connection."""
        assert self._transport is not None
        self._heard, self._tail, self._wanted = Heard(), b"", None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        heard, now_s = self._heard, time.perf_counter()
        if not heard.head:
            self._tail += data
            head, found, data = self._tail.partition(_HEAD_END)
            if not found:
                return
            heard.head, self._tail = head, b""
            length = heard.header("content-length")
            self._wanted = int(length) if length.isdecimal() else None
        if data:
            heard.parts.append((now_s, data))
        if self._ended(data):
            heard.whole = True
            self._finish()

    def _ended(self, data: bytes) -> bool:
        if self._wanted is not None:
            self._wanted -= len(data)
            return self._wanted <= 0
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        return self._tail == _LAST_CHUNK

    def _finish(self) -> None:
        self.open = self.open and self._heard.header("connection").lower() != "close"
        if self._done is not None and not self._done.done():
            self._done.set_result(self._heard)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._finish()

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()


class ByteClient:
    """As many connections to one server as there are requests at once; each is used again when its answer has ended."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = f" HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
        self._idle: list[_Line] = []

    async def post(self, path: str, body: bytes) -> Heard:
        """The answer to this body. Raises Unavailable where nobody answers."""
        request = f"POST {path}{self._head}{len(body)}\r\n\r\n".encode() + body
        while self._idle:
            line = self._idle.pop()
            if line.open and (heard := await self._asked(line, request)).head:
                return heard
        line = await self._connected()
        heard = await self._asked(line, request)
        if not heard.head:
            raise Unavailable("the server closed the connection without an answer")
        return heard

    async def _asked(self, line: _Line, request: bytes) -> Heard:
        try:
            heard = await line.ask(request)
        except BaseException:
            line.close()
            raise
        if line.open:
            self._idle.append(line)
        return heard

    async def _connected(self) -> _Line:
        try:
            _, line = await asyncio.get_running_loop().create_connection(_Line, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise Unavailable(f"no connection to {self._host}:{self._port}: {error}") from None
        return line

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._idle:
            line.close()
