"""The environments of other engines: a virtual environment for each below one folder, and the models in its own form.

`specserve bench peer-env NAME FOLDER` makes one; `bench compare --peers FOLDER` uses those that are there. What an
engine needs is said by its file in `peer_servers/`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

from specserve import cache, drafting, folders
from specserve.bench.report import Row
from specserve.config import Config, ModelConfig
from specserve.errors import ConfigError, SpecserveError
from specserve.models.loading import Role, prepare

ROOM = "bench.peer_servers"
LAUNCH = Path(__file__).parent / "peer_servers" / "_launch.py"

_MODELS = "models"
_LAST_LINES = 12
_TAIL_BYTES = 8192
_PATIENCE_S = 5.0
_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a peer runs. `peer` is its file's module; `folder` holds all environments, and models."""

    name: str
    peer: Any
    folder: Path

    @staticmethod
    def of(name: str, folder: Path) -> Environment:
        """The environment of a peer by the name of its file, or by the dotted path of one. Raises ConfigError."""
        return Environment(name.rpartition(".")[2], folders.load(ROOM, name), folder)

    @property
    def own(self) -> bool:
        """Whether it is apart from specserve's."""
        return bool(self.peer.REQUIREMENTS)

    @property
    def python(self) -> Path:
        """The interpreter, there or not."""
        return self.folder / self.name / "bin" / "python" if self.own else Path(sys.executable)

    def version(self) -> str | None:
        """The engine's version; None where it is not installed."""
        places = [str(place) for place in (self.folder / self.name).glob("lib/python*/site-packages")]
        found = distributions(path=places) if self.own else distributions()
        wanted = self.peer.DISTRIBUTION.lower()
        return next((one.version for one in found if one.name.lower().replace("_", "-") == wanted), None)

    def check(self) -> None:
        """Raise ConfigError with how to make it, unless it is there."""
        if not self.python.exists() or self.version() is None:
            raise ConfigError(
                f"{self.name} has no environment at {self.folder / self.name}; make it with "
                f"`specserve bench peer-env {self.name} {self.folder}`"
            )

    def command(self, what: str, fields: dict[str, Any]) -> list[str]:
        """How the launcher is run in it. -P, as a peer's file may have the name of its engine's package."""
        return [str(self.python), "-P", str(LAUNCH), str(self.peer.__file__), what, json.dumps(fields)]

    def variables(self, threads: int | None = None) -> dict[str, str]:
        """The environment variables of its processes: nothing that leads to packages of another environment."""
        inherited = {name: value for name, value in os.environ.items() if not self.own or name not in _INHERITED}
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return inherited | quiet | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def names() -> list[str]:
    """All peers that ship with specserve."""
    return folders.names_in(ROOM)


def make(environment: Environment, progress: Progress) -> None:
    """Create the virtual environment and install the engine, unless it is there. Raises SpecserveError."""
    if not environment.own or environment.version() is not None:
        return
    place = environment.folder / environment.name
    progress(f"installing {', '.join(environment.peer.REQUIREMENTS)} into {place} (minutes)")
    venv.create(place, with_pip=True, clear=place.exists())
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run(environment, "installing", [*pip, "install", *environment.peer.REQUIREMENTS])
    if unwanted := getattr(environment.peer, "UNWANTED", ()):
        _run(environment, "uninstalling", [*pip, "uninstall", "--yes", *unwanted])


def made(name: str, folder: Path, config: Config, progress: Progress) -> list[Row]:
    """An environment with both models in the peer's own form, as a table. Raises ConfigError or SpecserveError."""
    environment = Environment.of(name, folder)
    folder.mkdir(parents=True, exist_ok=True)
    make(environment, progress)
    models: list[tuple[ModelConfig, Role]] = [(config.target, "target")]
    if drafting.has_worker(config.draft) and "draft" in environment.peer.MODES:
        models.append((config.draft_model, "draft"))
    rows: list[Row] = [{"what": environment.peer.DISTRIBUTION, "is": environment.version()}]
    for model, role in models:
        place = exported(environment, prepare(model, progress, role=role), progress)
        rows.append({"what": role, "is": str(place)})
    return rows


def exported(environment: Environment, model: Path, progress: Progress) -> Path:
    """A folder of safetensors in the peer's own form, made once for these weights. Raises SpecserveError."""
    if not environment.own:
        return model
    source = _with_whole_head(model, environment.folder, progress)
    if not hasattr(environment.peer, "export"):
        return source

    def build(to: Path) -> None:
        progress(f"exporting {source.name} for {environment.name} (once)")
        _run(environment, "exporting", environment.command("export", {"source": str(source), "to": str(to)}))

    return cache.built_once(f"{environment.name}-{_identity(model)}", build, under=environment.folder / _MODELS)


def _with_whole_head(model: Path, folder: Path, progress: Progress) -> Path:
    """The model itself, or one of the ordinary layout where it has a head for a part of the vocabulary."""
    from specserve.bench import whole_head

    if not whole_head.is_missing(model):
        return model

    def build(to: Path) -> None:
        progress(f"giving {model.name} a head for all of its vocabulary, as other engines want it (once)")
        whole_head.write(model, to)

    return cache.built_once(f"whole-head-{_identity(model)}", build, under=folder / _MODELS)


def _identity(model: Path) -> str:
    return cache.key_of(*(cache.file_identity(path) for path in sorted(model.glob("*.safetensors"))))


def _run(environment: Environment, what: str, command: list[str]) -> None:
    """Run a command that says what went wrong only when something does. Raises SpecserveError."""
    with tempfile.TemporaryFile() as log:
        with running(command, environment.variables(), log) as process:
            status = process.wait()
        if status:
            raise SpecserveError(f"{environment.name}: {what} ended with status {status}:\n{last_lines(log)}")


@contextmanager
def running(command: list[str], variables: dict[str, str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process while the block lasts, apart from our terminal's signals. At the end nothing that it started is left.

    Its standard input closes with the block, and when this process dies: that is when the launcher ends by itself.
    """
    from specserve.cluster import processes

    with subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            ours = {one for one in processes.descendants() if one.pid == process.pid}
            ours |= processes.descendants(process.pid)
            _signal_group(process.pid, signal.SIGTERM)
            processes.end(ours, patience_s=_PATIENCE_S)
            _signal_group(process.pid, signal.SIGKILL)


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)


def last_lines(log: IO[bytes]) -> str:
    """The end of what was written, for a person who asks why."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
