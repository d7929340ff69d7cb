"""What runs in a peer's own environment: it exports a model, or starts the peer's server. Standard library only.

`python _launch.py PEER_FILE serve|export JSON`, with the fields of `Asked`, or source and to. The process and all
that it started end when its standard input closes, so that nothing outlives who started it, however that one ended.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

Tokens = list[int]
Generate = Callable[[Sequence[Tokens], int], Sequence[Tokens]]
"""Answers of max_tokens tokens each to all of these prompts."""

_GATHER_S = 0.005
"""How long the first request waits for company: those that came together are to be answered together."""


@dataclass(frozen=True)
class Asked:
    """What a server is to be. target and draft are in the peer's own form; depth counts drafted tokens per round."""

    mode: str
    port: int
    target: str
    draft: str
    depth: int
    threads: int
    requests: int
    context: int


class Engine(Protocol):
    """Something that takes requests while it works on others."""

    def add(self, key: int, prompt: Tokens, max_tokens: int) -> None:
        """Take a request."""
        ...

    def step(self) -> list[tuple[int, Tokens]]:
        """Work on what was taken, for a while. Returns what is finished."""
        ...


class Together:
    """An engine around a function that answers a batch: what waits is answered at once, in groups of equal length."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._waiting: dict[int, list[tuple[int, Tokens]]] = {}

    def add(self, key: int, prompt: Tokens, max_tokens: int) -> None:
        """Take a request."""
        self._waiting.setdefault(max_tokens, []).append((key, prompt))

    def step(self) -> list[tuple[int, Tokens]]:
        """One batch, of requests for equally many tokens."""
        max_tokens = next(iter(self._waiting))
        keys, prompts = zip(*self._waiting.pop(max_tokens), strict=True)
        return list(zip(keys, self._generate(prompts, max_tokens), strict=True))


class Desk:
    """Requests of many threads, handed to an engine by one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._new: queue.SimpleQueue[tuple[Tokens, int, Future[Tokens]]] = queue.SimpleQueue()
        self._open: dict[int, Future[Tokens]] = {}
        self._count = 0

    def answer(self, prompt: Tokens, max_tokens: int) -> Tokens:
        """Wait for the answer. Raises what the engine raised."""
        future: Future[Tokens] = Future()
        self._new.put((prompt, max_tokens, future))
        return future.result()

    def work(self) -> None:
        """Serve for ever. An engine that raises fails all that is open."""
        while True:
            self._take()
            try:
                for key, tokens in self._engine.step():
                    if key in self._open:  # else it failed with others before
                        self._open.pop(key).set_result(tokens)
            except Exception as error:  # whatever an engine raises; its clients are to hear of it
                for future in self._open.values():
                    future.set_exception(error)
                self._open.clear()

    def _take(self) -> None:
        """Hand over what is new; with nothing to do, wait for it."""
        if not self._open:
            self._add(*self._new.get())
            threading.Event().wait(_GATHER_S)
        while not self._new.empty():
            self._add(*self._new.get())

    def _add(self, prompt: Tokens, max_tokens: int, future: Future[Tokens]) -> None:
        self._count += 1
        self._open[self._count] = future
        self._engine.add(self._count, prompt, max_tokens)


def serve(engine: Engine, port: int, name: str) -> None:
    """OpenAI's completions, in as much as a bench asks for, on the loopback address, until the process ends."""
    desk = Desk(engine)
    threading.Thread(target=desk.work, daemon=True).start()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._say(200, {"data": [{"id": name}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                tokens = desk.answer(asked["prompt"], asked["max_tokens"])
            except Exception as error:  # the bench shows it, and goes on with the next peer
                self._say(500, {"error": f"{type(error).__name__}: {error}"})
            else:
                self._say(200, {"choices": [{"token_ids": tokens}], "usage": {"completion_tokens": len(tokens)}})

        def _say(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def _end_with_standard_input() -> None:
    """End this process group when nobody holds the other end any more."""

    def wait() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("peer", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(path: str, what: str, arguments: str) -> None:
    """Do what was asked of the peer in this file."""
    _end_with_standard_input()
    peer, fields = _loaded(Path(path)), json.loads(arguments)
    if what == "export":
        peer.export(Path(fields["source"]), Path(fields["to"]))
        return
    asked = Asked(**fields)
    if hasattr(peer, "serve"):
        peer.serve(asked)
    else:
        engine = peer.engine(asked) if hasattr(peer, "engine") else Together(peer.generate(asked))
        serve(engine, asked.port, Path(path).stem)


if __name__ == "__main__":
    main(*sys.argv[1:])
