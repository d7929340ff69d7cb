"""`specserve bench`: what its commands have in common. Each is a function from arguments to what was found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specserve.config import Config

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from specserve.bench.report import Row
    from specserve.cli.options import Places

    Options = TypeVar("Options", bound=DataclassInstance)


@dataclass(frozen=True, slots=True)
class Findings:
    """What a bench leaves behind.

    tables are shown, each under its title. settings and rows go to the file of --json; rows None are those of all
    tables. plot draws the file of --plot. broken are promises that were not kept: the command then fails.
    """

    tables: Sequence[tuple[str, Sequence[Row]]]
    settings: Mapping[str, Any]
    rows: Sequence[Row] | None = None
    plot: Callable[[Path], None] | None = None
    broken: Sequence[str] = ()


Find = Callable[[argparse.Namespace], Findings]


def add(places: Places) -> None:
    """Add `bench` with all its commands."""
    from specserve.cli import bench_models, bench_parts, bench_systems

    benches = places.add_parser("bench", help="measure speed and acceptance, systems side by side").add_subparsers(
        required=True, metavar="BENCH"
    )
    for group in (bench_models, bench_systems, bench_parts):
        group.add(benches)


def json_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """--json, and in words what is written beside the machine."""
    parser.add_argument("--json", type=Path, help=f"also write machine, {what} to this file")


def finds(parser: argparse.ArgumentParser, find: Find) -> None:
    """Let the command of this parser show, and write, what `find` finds."""
    parser.set_defaults(verb=partial(_run, find))


def _run(find: Find, arguments: argparse.Namespace) -> int:
    from specserve.bench.report import check_json_path, show, write_json

    json, plot = (getattr(arguments, name, None) for name in ("json", "plot"))
    for path in (json, plot):
        if path is not None:
            check_json_path(path)
    found = find(arguments)
    for title, rows in found.tables:
        show(title, rows)
    if json is not None:
        everything = [row for _, rows in found.tables for row in rows]
        write_json(json, found.settings, everything if found.rows is None else found.rows)
    if plot is not None and found.plot is not None:
        found.plot(plot)
    for promise in found.broken:
        print(f"specserve: not kept: {promise}", file=sys.stderr)
    return 1 if found.broken else 0


def options_of(kind: type[Options], arguments: argparse.Namespace) -> Options:
    """A bench's options: each field has the argument of the same name, and its default where there is none."""
    given = vars(arguments)
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})


def settings_of(options: DataclassInstance, config: Config | None = None) -> dict[str, Any]:
    """What a JSON file says of how it was measured: the options, below `bench` beside a configuration."""
    return asdict(options) if config is None else config.model_dump() | {"bench": asdict(options)}


def progress(text: str) -> None:
    """Tell a person who waits what a bench is at."""
    print(f"· {text}", file=sys.stderr, flush=True)
