"""What `specserve bench chaos` saw: by kind of fault, by kill of a draft worker, and which promises were not kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from specserve.bench.load import quantile
from specserve.bench.report import Row
from specserve.bench.watched import Seen

LONGEST_RECOVERY_S: Final = 120.0
DRAFT_KILL_SLACK_S: Final = 0.1
"""What a killed draft worker may hold up a stream by, beyond a round of plain decoding."""

_NOTICED_S: Final = 2.0
"""Within this time a dead worker is missed, even where only its silence tells (`cluster.lost_after_s`)."""

_MAY_FAIL: Final = frozenset({"ingress"})
"""Streams may end before their time where this is hurt: a socket cannot be moved to another process."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to whom, and when it began and was over, in seconds of the monotonic clock.

    recovered_s is None where it was not over in two minutes.
    """

    kind: str
    role: str
    began_s: float
    recovered_s: float | None

    @property
    def end_s(self) -> float:
        """When it was over, or given up."""
        return self.began_s + LONGEST_RECOVERY_S if self.recovered_s is None else self.recovered_s


@dataclass(slots=True)
class Outcome:
    """All that was seen.

    left is what was still held when every stream had ended, by metric. recomputed are the positions that targets
    computed again. plain_step_s is the time between two events of a stream without drafts, before any fault.
    """

    faults: list[Fault] = field(default_factory=list)
    streams: list[Seen] = field(default_factory=list)
    wrong: list[Seen] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    recomputed: float = 0.0
    plain_step_s: float | None = None

    def note(self, seen: Seen, expected: str) -> None:
        """A stream ended."""
        self.streams.append(seen)
        if seen.wrong(expected):
            self.wrong.append(seen)

    def during(self, fault: Fault) -> list[Seen]:
        """The streams of which some part lies between the beginning and the end of a fault."""
        return [seen for seen in self.streams if seen.ended_s >= fault.began_s and seen.began_s <= fault.end_s]


def rows(outcome: Outcome) -> list[Row]:
    """A row for each kind of fault and role.

    streams were open at some time of these faults; failed ended before their time, with word of it or a broken
    connection. stall is the longest gap between two events of any stream during one fault.
    """
    cases = sorted({(fault.role, fault.kind) for fault in outcome.faults})
    return [_row(role, kind, outcome) for role, kind in cases]


def _row(role: str, kind: str, outcome: Outcome) -> Row:
    faults = [fault for fault in outcome.faults if (fault.role, fault.kind) == (role, kind)]
    times = [fault.recovered_s - fault.began_s for fault in faults if fault.recovered_s is not None]
    stalls = [_stall_s(fault, outcome) for fault in faults]
    open_then = {id(seen): seen for fault in faults for seen in outcome.during(fault)}.values()
    blamed = [seen for seen in outcome.streams if (found := blame(seen, outcome.faults)) and found in faults]
    return {
        "role": role,
        "fault": kind,
        "times": len(faults),
        "recovered": len(times),
        "recovery_p50_s": quantile(times, 0.5),
        "recovery_max_s": max(times, default=None),
        "stall_p50_s": quantile(stalls, 0.5),
        "stall_max_s": max(stalls, default=None),
        "streams": len(open_then),
        "failed": sum(seen.end in ("failed", "cut") for seen in blamed),
        "hung": sum(seen.end == "hung" for seen in blamed),
    }


def _stall_s(fault: Fault, outcome: Outcome) -> float:
    return max((seen.longest_gap_s(fault.began_s, fault.end_s) for seen in outcome.during(fault)), default=0.0)


def draft_kills(outcome: Outcome) -> list[Row]:
    """A row for each draft worker that was killed.

    next is the longest time between two events of any stream in which the kill lies: how long the next round took. gap
    is the longest of which some part lies in the two seconds after the kill, and shall stay below the bar: a round of
    plain decoding at this load, as clients see it, and 100 ms. before is the longest that ended in the two seconds
    before it: what the load itself does. stall is the longest until all was well again, with the start of another
    process beside the streams.
    """
    return [_draft_kill(number, fault, outcome) for number, fault in enumerate(_draft_faults(outcome))]


def _draft_faults(outcome: Outcome) -> list[Fault]:
    return [fault for fault in outcome.faults if (fault.role, fault.kind) == ("draft", "kill")]


def _draft_kill(number: int, fault: Fault, outcome: Outcome) -> Row:
    at_s, bar_s = fault.began_s, _bar_s(outcome)
    gap_s = _longest_gap_s(outcome, at_s, at_s + _NOTICED_S)
    return {
        "kill": number,
        "streams": len(outcome.during(fault)),
        "before_s": _longest_whole_gap_s(outcome, at_s - _NOTICED_S, at_s),
        "next_s": _longest_gap_s(outcome, at_s, at_s),
        "gap_s": gap_s,
        "bar_s": bar_s,
        "within": None if bar_s is None else "yes" if gap_s <= bar_s else "NO",
        "stall_s": _stall_s(fault, outcome),
        "recovery_s": None if fault.recovered_s is None else fault.recovered_s - fault.began_s,
    }


def _bar_s(outcome: Outcome) -> float | None:
    return None if outcome.plain_step_s is None else outcome.plain_step_s + DRAFT_KILL_SLACK_S


def _longest_gap_s(outcome: Outcome, from_s: float, to_s: float) -> float:
    return max((seen.longest_gap_s(from_s, to_s) for seen in outcome.streams), default=0.0)


def _longest_whole_gap_s(outcome: Outcome, from_s: float, to_s: float) -> float:
    """Of those that ended between these two times."""
    pairs = (pair for seen in outcome.streams for pair in pairwise(seen.at))
    return max((after - before for before, after in pairs if from_s <= after <= to_s), default=0.0)


def draft_kills_together(outcome: Outcome) -> Row | None:
    """All kills of draft workers in one row: the median and the longest of each time; None where there was none."""
    kills = draft_kills(outcome)
    if not kills:
        return None
    times: dict[str, float | None] = {}
    for name in ("before", "next", "gap", "stall"):
        found = [value for kill in kills if isinstance(value := kill[f"{name}_s"], float)]
        times |= {f"{name}_p50_s": quantile(found, 0.5), f"{name}_max_s": max(found, default=None)}
    return {
        "kills": len(kills),
        "plain_step_s": outcome.plain_step_s,
        "bar_s": _bar_s(outcome),
        "within": sum(kill["within"] == "yes" for kill in kills),
    } | times


def blame(seen: Seen, faults: Sequence[Fault]) -> Fault | None:
    """The fault because of which a stream did not finish: the last one that began before its end."""
    if seen.end == "finished":
        return None
    before = [fault for fault in faults if fault.began_s <= seen.ended_s]
    return before[-1] if before else None


def summary(outcome: Outcome) -> Row:
    """The whole run in one row."""
    ends = [seen.end for seen in outcome.streams]
    return {
        "faults": len(outcome.faults),
        "streams": len(ends),
        "finished": ends.count("finished"),
        "failed": ends.count("failed"),
        "cut": ends.count("cut"),
        "hung": ends.count("hung"),
        "wrong": len(outcome.wrong),
        "left": sum(outcome.left.values()),
        "recomputed": outcome.recomputed,
    }


def broken(outcome: Outcome) -> list[str]:
    """The promises that were not kept, in words."""
    told = []
    if outcome.wrong:
        told.append(f"{len(outcome.wrong)} streams had another text, or ended more than once")
    if hung := sum(seen.end == "hung" for seen in outcome.streams):
        told.append(f"{hung} streams never ended")
    if outcome.left:
        told.append(f"still held: {', '.join(f'{value:g} {name}' for name, value in outcome.left.items())}")
    if lost := [fault for fault in outcome.faults if fault.recovered_s is None]:
        told.append(f"{len(lost)} faults were not recovered from: {lost[0].kind} {lost[0].role} was the first")
    unexcused = [seen for seen in outcome.streams if _unexcused(seen, outcome.faults)]
    if unexcused:
        told.append(f"{len(unexcused)} streams failed that should have gone on: {unexcused[0].reason or 'cut'}")
    return told


def _unexcused(seen: Seen, faults: Sequence[Fault]) -> bool:
    if seen.end not in ("failed", "cut"):
        return False
    fault = blame(seen, faults)
    return fault is None or fault.role not in _MAY_FAIL
