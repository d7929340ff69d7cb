"""`specserve serve`: a local Ray (or a given one), the application, a banner, and an orderly end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import ray
from ray import serve
from rich.console import Console

from specserve.cluster.deploy import APP_NAME, INGRESS, PIPELINE, application
from specserve.cluster.fleet import Fleet
from specserve.cluster.https import http_options
from specserve.cluster.local_ray import check_port, claimed, free_port, local_ray
from specserve.cluster.pipeline import PipelineState
from specserve.cluster.placement import DRAFT
from specserve.cluster.preflight import check_config
from specserve.config import Config, unkeyed
from specserve.errors import ConfigError

log = logging.getLogger(__name__)

_POLL_S = 0.25
_DRAIN_S = 10.0
_STOP_S = 15.0
_CONNECT_S = 5.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one comes when the terminal is closed


def serve_until_stopped(config: Config, *, ray_address: str | None = None) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError when the deployment cannot start, in words."""
    config = with_port(config)
    stopping = threading.Event()
    with claimed(config.server.host, config.server.port), _own_stdout() as out, _signals(stopping):
        check_config(config, models_here=ray_address is None)
        if not stopping.is_set():
            _serve(config, stopping, ray_address, out)


def _serve(config: Config, stopping: threading.Event, ray_address: str | None, out: TextIO) -> None:
    # Ray replaces signal handlers when it starts, so ours go in once more behind it.
    with (
        _ray(ray_address, config) as logs,
        _told_behind("waiting for Ray's processes to end" if ray_address is None else "leaving Ray"),
        _signals(stopping),
        deployed(config, stopping, _Display(), own_ray=ray_address is None) as up,
        _told_behind("waiting for the workers and the HTTP endpoint to end"),
    ):
        if up:
            _banner(config, logs, out)
            _tell_workers()
            _warn(config)
            _warn_of_open_ray(ray_address, os.environ)
            _warn_of_links()
            stopping.wait()
            drain()


def with_port(config: Config) -> Config:
    """The configuration with a port that is free now; port 0 picks one. Raises ConfigError when it is taken."""
    server = config.server
    if server.port == 0:
        server = server.model_copy(update={"port": free_port(server.host)})
        return config.model_copy(update={"server": server})
    check_port(server.host, server.port)
    return config


def _ray(address: str | None, config: Config) -> contextlib.AbstractContextManager[Path | None]:
    return _own_ray(config) if address is None else _existing_ray(address)


def _own_ray(config: Config) -> contextlib.AbstractContextManager[Path]:
    cluster = config.cluster
    ingresses = cluster.max_ingress_replicas or cluster.ingress_replicas
    return local_ray(ingresses, cluster.most_pipelines, config.worker_processes)


@contextlib.contextmanager
def _existing_ray(address: str) -> Iterator[Path | None]:
    _check_listening(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, namespace=APP_NAME)
    except Exception as error:  # Ray raises many kinds here; to the user it is one thing
        raise ConfigError(f"cannot reach Ray at {address}: {error}") from None
    try:
        yield None
    finally:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Raise ConfigError at once where nobody listens there, which Ray itself tries for over a minute."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():  # e.g. auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot reach Ray at {address}: {error}") from None


@contextlib.contextmanager
def deployed(
    config: Config, stopping: threading.Event, display: _Display | None = None, *, own_ray: bool = True
) -> Iterator[bool]:
    """Start Serve and the application; yields True when it serves, False when told to stop before.

    At the end the application is deleted, and Serve is shut down too unless it has other applications on a Ray that is
    not our own. Raises ConfigError where Serve runs already: it keeps the HTTP address that it was started with.
    """
    _quiet_logs()
    if stopping.is_set():
        yield False
        return
    if serve.status().proxies:
        raise ConfigError(
            "Ray Serve runs on this cluster already and keeps the HTTP address that it was started with; deploy to it "
            "with `serve deploy deploy/serve.yaml`, or end it with `serve shutdown`"
        )
    http = http_options(config.server)
    _listen(config, http)
    try:
        with contextlib.nullcontext() if stopping.is_set() else _application(config):
            yield not stopping.is_set() and _wait(config, stopping, display or _Display(quiet=True))
    finally:
        if own_ray or not serve.status().applications:
            serve.shutdown()


def _listen(config: Config, http: Any) -> None:
    """Start Serve's proxy. Raises ConfigError where somebody took the port since it was looked at."""
    try:
        serve.start(http_options=http, logging_config={"enable_access_log": False, "log_level": "WARNING"})
    except Exception as error:
        if "Failed to bind" not in str(error):
            raise
        serve.shutdown()
        taken = f"{config.server.host}:{config.server.port}"
        raise ConfigError(f"another process took {taken} meanwhile; end it, or give another --port") from None


@contextlib.contextmanager
def _application(config: Config) -> Iterator[None]:
    target = serve.RunTarget(application(config), name=APP_NAME, route_prefix="/")
    try:
        serve.run_many([target], wait_for_applications_running=False)
        yield
    finally:
        _ask_all("stop", timeout_s=_STOP_S)
        serve.delete(APP_NAME)


@contextlib.contextmanager
def running(config: Config) -> Iterator[tuple[str, Config]]:
    """A local Ray that serves this configuration without keys while the block lasts: its base URL and final config.

    Raises ConfigError when the deployment cannot start, in words.
    """
    config = with_port(unkeyed(config))
    check_config(config, models_here=True)
    with (
        claimed(config.server.host, config.server.port),
        _own_stdout(),
        _own_ray(config),
        deployed(config, threading.Event()),
    ):
        yield f"http://{config.server.host}:{config.server.port}", config


def _wait(config: Config, stopping: threading.Event, display: _Display) -> bool:
    """Until the application serves. Raises ConfigError with the pipeline's own words when it never will."""
    deadline_s = time.monotonic() + config.cluster.start_timeout_s
    with display:
        while not stopping.wait(_POLL_S):
            states = pipeline_states()
            display.show(_progress(states))
            _raise_failure(states)
            app = serve.status().applications.get(APP_NAME)
            if app is not None and app.status == "RUNNING" and all(state.ready for state in states):
                return True
            if app is not None and app.status == "DEPLOY_FAILED":
                _raise_failure(pipeline_states())
                raise ConfigError(f"the application did not start: {app.message}")
            if time.monotonic() > deadline_s:
                raise ConfigError(f"not ready after cluster.start_timeout_s = {config.cluster.start_timeout_s:g} s")
    return False


def _progress(states: list[PipelineState]) -> dict[str, str]:
    """What each worker does; with several pipelines, numbered by those that it works for."""
    if len(states) == 1:
        return states[0].progress
    told: dict[str, str] = {}
    for number, state in enumerate(states, 1):
        sharing = [n for n, other in enumerate(states, 1) if other.keeper == state.keeper is not None]
        for role, doing in state.progress.items():
            numbers = sharing if role == DRAFT and sharing else [number]
            told[f"{role} {'+'.join(map(str, numbers))}"] = doing
    return told


def _raise_failure(states: list[PipelineState]) -> None:
    for state in states:
        if state.failure is not None:
            raise ConfigError(state.failure)


def pipeline_states() -> list[PipelineState]:
    """What the pipelines say about themselves; those that do not answer, starting or being replaced, are left out."""
    return [state for state in _ask_all("state", timeout_s=2) if state is not None]


def running_ingresses() -> int:
    """HTTP processes that Serve sends requests to; one that it has found stuck is not among them."""
    app = serve.status().applications.get(APP_NAME)
    return 0 if app is None else app.deployments[INGRESS].replica_states.get("RUNNING", 0)


def _ask_all(method: str, timeout_s: float) -> list[Any]:
    """The answers of all pipelines, asked at the same time; None from those that do not answer."""
    answers: list[Any] = []
    with contextlib.suppress(Exception):  # there is none yet
        fleet = Fleet(serve.get_deployment_handle(PIPELINE, APP_NAME))
        fleet.any().name.remote().result(timeout_s=timeout_s)
        calls = [getattr(fleet.at(name), method).remote() for name in fleet.names()]
        for call in calls:
            try:
                answers.append(call.result(timeout_s=timeout_s))
            except Exception:
                answers.append(None)
    return answers


def drain() -> None:
    """Take no new requests and give running ones a bounded time to end."""
    _ask_all("drain", timeout_s=2)
    deadline_s = time.monotonic() + _DRAIN_S
    told = False
    while time.monotonic() < deadline_s:
        answers = _ask_all("open_requests", timeout_s=2)
        left = sum(answer or 0 for answer in answers)
        if left == 0 and None not in answers:  # who does not answer may have some
            return
        if not told:
            told = True
            what = f"draining {left} request(s)" if left else "waiting for a pipeline that does not answer"
            _tell(f"{what}, up to {_DRAIN_S:g} s")
        time.sleep(_POLL_S)


def _warn(config: Config) -> None:
    if config.server.open_to_others:
        _tell(
            f"warning: anybody who reaches {config.server.host} can use this server; set SPECSERVE_API_KEY, or listen "
            f"on 127.0.0.1"
        )


def _warn_of_open_ray(address: str | None, environment: Mapping[str, str]) -> None:
    """Whoever reaches a Ray without tokens can run code on it. One of our own always has them."""
    if address is not None and environment.get("RAY_AUTH_MODE") != "token":
        _tell(
            "warning: token authentication of Ray is not switched on here (RAY_AUTH_MODE=token on every node), and who "
            "reaches Ray's ports runs code on its machines; switch it on, or keep those ports private"
        )


def _tell_workers() -> None:
    """Where each worker runs, and what it holds there."""
    for role, doing in _progress(pipeline_states()).items():
        _tell(f"{role}: {doing}")


def _warn_of_links() -> None:
    for line in dict.fromkeys(line for state in pipeline_states() for line in state.warnings):
        _tell(f"warning: {line}")


def _tell(line: str) -> None:
    """A line to the terminal, also from a signal handler, where a buffered stream may be in the middle of another."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


@contextlib.contextmanager
def _told_behind(line: str) -> Iterator[None]:
    """Say at the end of the block what its caller then waits for."""
    try:
        yield
    finally:
        _tell(line)


class _Display:
    """One line that says what the workers are doing; on a terminal it moves, elsewhere changes are printed."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._status = self._console.status("starting") if self._console.is_terminal else None
        self._shown = ""

    def __enter__(self) -> None:
        if self._status is not None:
            self._status.start()

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, progress: dict[str, str]) -> None:
        """Show what each role is doing."""
        text = ", ".join(f"{role}: {doing}" for role, doing in progress.items()) or "starting"
        if text == self._shown:
            return
        self._shown = text
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """The real stdout. Ray prints the news of its daemons to `sys.stdout`, whatever it is told; they go nowhere."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield sys.__stdout__ or nowhere


def _banner(config: Config, logs: Path | None, out: TextIO) -> None:
    """logs is the folder of the processes' logs, where they are this command's own."""
    host, port, scheme = config.server.host, config.server.port, config.server.scheme
    shown = f"[{host}]" if ":" in host else host
    shown = "127.0.0.1" if host == "0.0.0.0" else shown
    hello = [{"role": "user", "content": "Hello"}]
    # Small models say odd things at the API's own temperature, which is 1.
    asked = {"model": config.served_name, "messages": hello, "max_tokens": 100, "temperature": 0}
    body = json.dumps(asked, ensure_ascii=False)
    # The variable may name several keys. The key itself is not for logs.
    key = '-H "Authorization: Bearer ${SPECSERVE_API_KEY%%,*}" ' if config.server.api_keys else ""
    for line in (
        f"specserve serves {config.served_name} on {scheme}://{shown}:{port}/v1  (stop with Ctrl-C)",
        f"drafts: {config.told_drafts}, rule {config.engine.rule}",
        f"curl {scheme}://{shown}:{port}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'",
        f"a page to watch it and to chat: {scheme}://{shown}:{port}/",
        *([] if logs is None else [f"logs, while it runs: {logs}"]),
    ):
        print(line, file=out, flush=True)


@contextlib.contextmanager
def _signals(stopping: threading.Event) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP asks for an orderly end, a second one raises KeyboardInterrupt.

    Where a closed terminal is to be survived (`nohup`), it is.
    """

    def stop(number: int, frame: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()
        _tell("stopping (Ctrl-C again to force)")

    asked = [number for number in _ENDING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in asked}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None was not set from Python and cannot be put back
                signal.signal(number, handler)


def _quiet_logs() -> None:
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
