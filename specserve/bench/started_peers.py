"""Servers of other engines that a bench starts itself, one after the other, each in its own environment.

All get the same models in float32, as many threads, and the same number of drafted tokens per round; what each of
them can, plainly and with either way of guessing, is a server of its own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen
from typing import IO

import httpx

from specserve.bench.peer_environments import Environment, Progress, exported, last_lines, running
from specserve.bench.peer_servers._launch import Asked
from specserve.bench.peers import Peer
from specserve.errors import SpecserveError, Unavailable

_START_S = 900.0
_POLL_S = 0.5
_TELL_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Work:
    """What each server is to be good for. target and draft are folders of safetensors; context counts positions."""

    target: Path
    draft: Path | None
    depth: int
    requests: int
    context: int
    threads: int

    def modes(self, environment: Environment) -> list[str]:
        """The ways of decoding that a peer has and this work allows."""
        able = {"plain": True, "draft": self.draft is not None and self.depth > 0, "ngram": self.depth > 0}
        return [mode for mode in environment.peer.MODES if able[mode]]


@contextmanager
def started(environment: Environment, mode: str, work: Work, progress: Progress) -> Iterator[Peer]:
    """A peer's server while the block lasts. Raises SpecserveError when it does not come up."""
    from specserve.cluster.local_ray import free_port

    environment.check()
    target = exported(environment, work.target, progress)
    draft = exported(environment, work.draft, progress) if mode == "draft" and work.draft is not None else ""
    port = free_port("127.0.0.1")
    asked = Asked(mode, port, str(target), str(draft), work.depth, work.threads, work.requests, work.context)
    command, variables = environment.command("serve", asdict(asked)), environment.variables(work.threads)
    name, url = environment.name, f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log, running(command, variables, log) as process:
        progress(f"starting {name} {mode}")
        _wait(f"{name} {mode}", url, process, log, progress)
        with Peer(name, url, mode, environment.version()) as peer:
            yield peer


def _wait(what: str, url: str, process: Popen[bytes], log: IO[bytes], progress: Progress) -> None:
    """Until it answers. Raises SpecserveError with its last words when it ended, Unavailable when it takes for ever."""
    began = told = time.monotonic()
    while not _answers(url):
        if process.poll() is not None:
            raise SpecserveError(f"{what} ended with status {process.returncode} at its start:\n{last_lines(log)}")
        now = time.monotonic()
        if now - began > _START_S:
            raise Unavailable(f"{what} did not come up in {_START_S:.0f} s:\n{last_lines(log)}")
        if now - told > _TELL_EVERY_S:
            told = now
            progress(f"waiting for {what}, {now - began:.0f} s")
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=_POLL_S).status_code == 200
    except httpx.HTTPError:
        return False
