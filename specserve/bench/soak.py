"""`specserve bench soak`: minutes of mixed load, and what each process holds at the start and at the end of them.

The load is that of `chaos`, without faults: greedy and seeded streams, each of which must end once with its text. A
look tells, for every process of the deployment, its resident memory and open files, and what shared memory there is.
The first look comes after the warm-up; a deployment that keeps what it is given back shows as growth. The looks of each
minute between tell a leak, which goes on, from what fills up and then stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from specserve.bench.chaos import left_over, settings_of
from specserve.bench.faults import status_of
from specserve.bench.report import Row
from specserve.bench.watched import Ask, Seen, expectations, keep_asking
from specserve.cluster import processes
from specserve.config import override, parse
from specserve.errors import ConfigError

Progress = Callable[[str], None]

_SHARED: Final = Path("/dev/shm")
_MIB: Final = 1 << 20
_LOOK_EVERY_S: Final = 60.0

_PATIENT: Final = {"cluster.lost_after_s": 30.0, "engine.hang_after_s": 300.0}
"""A process that is replaced cannot be compared, so that of a machine which is busy with other work is waited for."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. profile is that of emulated devices, or `demo` for the real pair."""

    profile: str = "qwen3-32b-0.6b-h100"
    clients: int = 16
    minutes: float = 30.0
    warm_up_s: float = 60.0
    max_tokens: int = 200
    most_growth: float = 0.02

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if self.clients < 1 or self.max_tokens < 2:
            raise ConfigError("--clients must be at least 1, and --max-tokens at least 2")
        if self.minutes <= 0 or self.warm_up_s < 0 or self.most_growth < 0:
            raise ConfigError("--minutes must be above 0, --warm-up and --growth at least 0")


@dataclass(frozen=True, slots=True)
class Use:
    """What one process holds: resident memory in bytes, and open files."""

    title: str
    resident: int
    files: int


@dataclass(frozen=True, slots=True)
class Look:
    """All processes below this one by number, and bytes of files in shared memory."""

    uses: dict[int, Use]
    shared: int


@dataclass(slots=True)
class Outcome:
    """What was seen. left is what was still held when all streams had ended, by metric; course is a look per minute."""

    first: Look
    last: Look
    course: list[Look] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    left: dict[str, float] = field(default_factory=dict)

    def note(self, seen: Seen, expected: str) -> None:
        """A stream ended."""
        self.ends[seen.end] = self.ends.get(seen.end, 0) + 1
        self.wrong += seen.wrong(expected)


def look() -> Look:
    """What is held now."""
    uses = {}
    for process in processes.descendants():
        with contextlib.suppress(OSError):  # it ended meanwhile
            uses[process.pid] = _use(process.pid)
    return Look(uses, sum(_size(path) for path in _SHARED.rglob("*")))


def _use(pid: int) -> Use:
    folder = Path(f"/proc/{pid}")
    words = (folder / "cmdline").read_text().replace("\0", " ").split()
    title = Path(words[0]).name if words else "?"
    return Use(title, 1024 * int(status_of(pid, "VmRSS")), len(list((folder / "fd").iterdir())))


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512 if path.is_file() else 0
    except OSError:
        return 0


def measure(options: Options, progress: Progress) -> Outcome:
    """Deploy, ask for so many minutes, look. Raises ConfigError, or SpecserveError where it does not serve."""
    from specserve.cluster.launch import running

    options.check()
    progress("starting Ray")
    tree = override(settings_of(options.profile, options.clients), _PATIENT)
    with running(parse(tree, where="bench soak")) as (url, config):
        return asyncio.run(_run(url, config.served_name, options, progress))


async def _run(url: str, model: str, options: Options, progress: Progress) -> Outcome:
    asks = Ask.all_of(model, options.max_tokens)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        expected = await expectations(client, asks)
        progress(f"warming up for {options.warm_up_s:g} s")
        await keep_asking(client, asks, options.clients, asyncio.sleep(options.warm_up_s), lambda *_: None)
        outcome = Outcome(look(), look())
        over = _wait(60 * options.minutes, outcome, progress)
        await keep_asking(client, asks, options.clients, over, lambda n, seen: outcome.note(seen, expected[n]))
        outcome.left = await left_over(client)
        outcome.last = look()
    return outcome


async def _wait(seconds: float, outcome: Outcome, progress: Progress) -> None:
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, _LOOK_EVERY_S))
        outcome.course.append(look())
        resident = sum(use.resident for use in outcome.course[-1].uses.values()) / _MIB
        progress(f"{sum(outcome.ends.values())} streams ended; {resident:.0f} MiB resident in all")


def rows(outcome: Outcome) -> list[Row]:
    """A row for each process that was there at the start and at the end, the largest first; growth is a share."""
    both = [(use, outcome.last.uses[pid]) for pid, use in outcome.first.uses.items() if pid in outcome.last.uses]
    return [
        {
            "process": first.title,
            "start_mib": first.resident / _MIB,
            "end_mib": last.resident / _MIB,
            "growth": last.resident / first.resident - 1 if first.resident else 0.0,
            "files_start": first.files,
            "files_end": last.files,
        }
        for first, last in sorted(both, key=lambda pair: -pair[1].resident)
    ]


def course(outcome: Outcome) -> dict[str, list[float]]:
    """MiB resident at each minute, under load, by process; those that were not there all the time are left out."""
    kept = [pid for pid in outcome.first.uses if all(pid in each.uses for each in [*outcome.course, outcome.last])]
    return {
        f"{outcome.first.uses[pid].title} {pid}": [round(each.uses[pid].resident / _MIB, 1) for each in outcome.course]
        for pid in kept
    }


def summary(outcome: Outcome) -> Row:
    """The whole run in one row."""
    return {
        "streams": sum(outcome.ends.values()),
        "finished": outcome.ends.get("finished", 0),
        "wrong": outcome.wrong,
        "left": sum(outcome.left.values()),
        "processes_start": len(outcome.first.uses),
        "processes_end": len(outcome.last.uses),
        "shared_start_mib": outcome.first.shared / _MIB,
        "shared_end_mib": outcome.last.shared / _MIB,
    }


def broken(outcome: Outcome, most_growth: float) -> list[str]:
    """The promises that were not kept, in words."""
    told = []
    if outcome.wrong or outcome.ends.get("finished", 0) != sum(outcome.ends.values()):
        told.append(f"streams ended as {outcome.ends}, {outcome.wrong} of them with another text")
    if outcome.left:
        told.append(f"still held: {', '.join(f'{value:g} {name}' for name, value in outcome.left.items())}")
    for pid, first in outcome.first.uses.items():
        last = outcome.last.uses.get(pid)
        if last is not None and last.resident > (1 + most_growth) * first.resident:
            grown = (last.resident - first.resident) / _MIB
            told.append(f"{first.title} grew by {grown:.1f} MiB, {last.resident / first.resident - 1:.1%}")
    if gone := outcome.first.uses.keys() - outcome.last.uses.keys():
        told.append(f"processes ended: {', '.join(outcome.first.uses[pid].title for pid in sorted(gone))}")
    return told
