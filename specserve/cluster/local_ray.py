"""A Ray of our own on this machine: loopback only, own temporary folder, nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import ray

from specserve.cluster import RAY_START_WAIT_S, processes
from specserve.cluster.placement import COORDINATOR_CPUS, INGRESS_CPUS, WORKER_CPUS
from specserve.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 128 * 1024 * 1024  # objects carry control messages only
_PATIENCE_S = 5.0
_PREFIX = "sps-"
_OWNER = "owner"  # who made a folder: process number, start time, namespace of process numbers

_PORT_WAIT = "RAY_gcs_server_port_wait_time_s"
"""How long Ray waits for its first process; for its node see `specserve.cluster`."""

# Keeps other users of this machine out, and a token file in the home folder alone. Ray reads it once per process.
_TOKEN = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)

_QUIET: dict[str, str | None] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray would have its actors wait behind everything else on the machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_task_events_report_interval_ms": "0",  # what nobody looks at piles up: 100,000 calls, a MiB a minute
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "specserve.cluster.proxy_headers.middlewares",
}

_UNHURRIED: dict[str, str] = {
    # Serve's controller goes through all replicas each time, 2 ms of a core. Whoever dies is seen at its health check.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",  # of each proxy and replica; ours go by the ledger
    # Files of logs, which no driver of ours reads: looked for ten times a second otherwise, while there are few.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "3600",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # what each process takes, for a dashboard that is not there
    "RAY_raylet_report_resources_period_milliseconds": "1000",  # there is one node
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_event_stats": "0",
}
"""How often processes of Ray and Serve look whether there is anything to do. They share the cores with the workers."""

_ALLOCATOR = {"RAY_JEMALLOC_PROFILE": "raylet", "RAY_JEMALLOC_CONF": "tcache:false"}
"""Ray's node process has 28 threads, each of which keeps what it frees: 0.1 MiB more a minute, with no more in use."""


def logical_cpus(ingresses: int = 1, pipelines: int = 1, workers: int = 2) -> int:
    """CPUs that Ray shall count: the machine's, or what pipelines and ingresses ask for on a smaller one.

    workers: processes that hold models, in one pipeline.
    """
    needed = ingresses * INGRESS_CPUS + pipelines * (COORDINATOR_CPUS + workers * WORKER_CPUS)
    return max(os.cpu_count() or 1, int(-(-needed // 1)))


@contextlib.contextmanager
def local_ray(ingresses: int = 1, pipelines: int = 1, workers: int = 2) -> Iterator[Path]:
    """Start Ray with room for so many, as `logical_cpus` counts, and see that every process and file of it ends.

    Yields the folder of its processes' logs, which goes with the others.
    """
    remove_orphans()
    folder = _own_folder()
    before = processes.descendants()
    started: set[processes.Process] = set()
    try:
        with _environment(_variables(_below(folder, "t"))):
            try:
                own = _started(folder, logical_cpus(ingresses, pipelines, workers), before)
                yield Path(own, "session_latest", "logs")
            finally:
                started = processes.descendants() - before
                ray.shutdown()
    finally:
        left = processes.end(started | (processes.descendants() - before), patience_s=_PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)
        if left:
            log.error("could not end processes %s", sorted(process.pid for process in left))


def _variables(temporary: str) -> dict[str, str | None]:
    """What the environment is to hold while this Ray runs."""
    return {
        **_QUIET,
        **{name: os.environ.get(name, value) for name, value in _UNHURRIED.items()},
        **_allocator(),
        "TMPDIR": temporary,
        "RAY_AUTH_TOKEN": _TOKEN,
        # Ray switches token authentication on for a local cluster where the user did not say otherwise.
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE"),
        _PORT_WAIT: os.environ.get(_PORT_WAIT, RAY_START_WAIT_S),
    }


def _allocator() -> Mapping[str, str]:
    """What allocators of Ray are told, unless somebody tells them something else, for a profile perhaps."""
    return {} if any(name in os.environ for name in _ALLOCATOR) else _ALLOCATOR


def _own_folder() -> str:
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    me = processes.current()
    if me is not None:
        Path(folder, _OWNER).write_text(f"{me.pid} {me.started} {_pid_namespace()}", encoding="ascii")
    return folder


def remove_orphans() -> None:
    """Remove the folders that killed launchers of this user left. What has no readable owner file is left alone."""
    if processes.current() is None:
        return
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):
            if owner.lstat().st_uid != os.getuid() or owner.parent.is_symlink():
                continue
            pid, started, namespace = owner.read_text(encoding="ascii").split()
            if namespace == _pid_namespace() and not processes.Process(int(pid), started).alive():
                shutil.rmtree(owner.parent, ignore_errors=True)


def _pid_namespace() -> str:
    """Containers may share the temporary folder, but not the numbers of their processes."""
    return os.readlink("/proc/self/ns/pid")


def _below(folder: str, name: str) -> str:
    """A folder that others cannot reach even when Ray opens it to all, as it does."""
    path = os.path.join(folder, name)
    os.mkdir(path, 0o700)
    return path


def _started(folder: str, cpus: int, before: set[processes.Process]) -> str:
    """The folder of a Ray that runs, below this one, at the second try if need be. Raises Unavailable.

    On a busy machine the first try may only have lacked time. before: processes that none of it started.
    """
    try:
        _start(own := _below(folder, "r"), cpus)
    except Unavailable as error:
        log.warning("%s; trying once more", error.message)
        ray.shutdown()
        processes.end(processes.descendants() - before, patience_s=_PATIENCE_S)
        _start(own := _below(folder, "s"), cpus)
    return own


def _start(folder: str, cpus: int) -> None:
    """Raises Unavailable where Ray cannot start. It waits `RAY_START_WAIT_S` for its first process and for its node."""
    try:
        ray.init(
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="specserve",
            _temp_dir=folder,
            _node_ip_address=_LOOPBACK,
        )
    except Exception as error:  # Ray raises plain ones
        raise Unavailable(
            f"Ray did not start on this machine ({error}); if the machine was busy, try again when it is less so"
        ) from error


@contextlib.contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when the HTTP port cannot be had."""
    if port:
        _bound(host, port)
        with claimed(host, port):
            pass


@contextlib.contextmanager
def claimed(host: str, port: int) -> Iterator[None]:
    """Keep other servers of this kind from beginning on this port. Raises ConfigError where one has.

    Serve's listeners share their port with any that come later, so of two servers that begin at once both would have
    it. A socket without a file is one process's alone, and goes with it. (Listeners that do not share wait a minute
    after each end, as long as connections that they closed are remembered.)
    """
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0specserve/{host}/{port}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # a system without such sockets
                yield
                return
            raise ConfigError(
                f"another server begins on port {port} of {host} just now, or runs there; end it, or choose another "
                "with --port (make serve ARGS='--port 8001')"
            ) from None
        yield


def free_port(host: str) -> int:
    """A port that was free a moment ago. Raises ConfigError for a host that nobody can listen on here."""
    return _bound(host, 0)


_NOT_HERE = (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL)


def _bound(host: str, port: int) -> int:
    """The number of a port that can be bound; 0 picks one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except UnicodeError:  # a text that cannot be a name
            raise ConfigError(f"server.host {host!r} is no address; give one of this machine") from None
        except OSError as error:
            reason = (
                f"server.port {port} on {host} cannot be used: {error.strerror}; "
                f"choose another with --port (make serve ARGS='--port 8001') or server.port, 0 for any that is free"
            )
            if error.errno in _NOT_HERE:
                reason = (
                    f"server.host {host!r} cannot be listened on: {error.strerror}; give an address of this machine"
                )
            raise ConfigError(reason) from None
        number: int = probe.getsockname()[1]
        return number
