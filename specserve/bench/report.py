"""What a benchmark leaves behind: a table for people and a JSON file that says where its numbers come from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specserve import __version__
from specserve.errors import ConfigError

Row = Mapping[str, str | int | float | None]

_PACKAGES = ("torch", "transformers", "ray", "numpy")


def machine() -> dict[str, Any]:
    """The machine that measured: processor, cores, memory, GPUs, load."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "system": platform.platform(terse=True),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def versions() -> dict[str, str]:
    """The packages whose speed is measured along."""
    found = {"python": platform.python_version(), "specserve": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout that this package runs from, with a + when files differ; None outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def check_json_path(path: Path) -> None:
    """Raise ConfigError unless `write_json` could write there; to be asked before anything is measured."""
    if path.is_dir():
        raise ConfigError(f"--json takes the name of a file, and {path} is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied")


def write_json(path: Path, config: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write {machine, versions, commit, config, rows}. Raises ConfigError when the file cannot be written."""
    report = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "config": dict(config),
        "rows": [dict(row) for row in rows],
    }
    try:
        path.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def show(title: str, rows: Sequence[Row], console: Console | None = None) -> None:
    """Print rows as a table; numbers with three significant digits."""
    table = Table(title=title, title_justify="left")
    columns = list(rows[0]) if rows else []
    for name in columns:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    (console or Console(width=140)).print(table)


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
