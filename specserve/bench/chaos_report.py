"""What `specserve bench chaos` saw: by kind of fault, by kill of a draft worker, and which promises were not kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from specserve.bench.load import quantile
from specserve.bench.report import Row
from specserve.bench.watched import Seen

LONGEST_RECOVERY_S: Final = 120.0
DRAFT_KILL_SLACK_S: Final = 0.1
"""What a killed draft worker may hold up a stream by, beyond a round of plain decoding."""

_NOTICED_S: Final = 2.0
"""Within this time a dead worker is missed, even where only its silence tells (`cluster.lost_after_s`)."""

_ABSENT_S: Final = 1.0
"""No process starts within this time, and no draft worker that is there is without a plan for so long."""

_TIMES: Final = ("rounds_before", "rounds", "before", "next", "gap", "stall")
_BARRED: Final = frozenset({"rounds", "next", "gap"})


@dataclass(frozen=True, slots=True)
class LostDraft:
    """The longest time between the ends of two rounds, in the two seconds before and after a draft worker was lost."""

    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to whom, and when it began and was over, in seconds of the monotonic clock.

    recovered_s is None where it was not over in two minutes. rounds is what the coordinator saw of it, told for a draft
    worker that was killed.
    """

    kind: str
    role: str
    began_s: float
    recovered_s: float | None
    rounds: LostDraft | None = None

    @property
    def may_cost_streams(self) -> bool:
        """A socket cannot be moved to another process. An ingress that is cut off from coordinators keeps its own."""
        return self.role == "ingress" and self.kind != "cut"

    @property
    def end_s(self) -> float:
        """When it was over, or given up."""
        return self.began_s + LONGEST_RECOVERY_S if self.recovered_s is None else self.recovered_s


@dataclass(slots=True)
class Outcome:
    """All that was seen.

    left is what was still held when every stream had ended, by metric. recomputed are the positions that targets
    computed again. plain_step_s is the time between two rounds without drafts at this load, before any fault.
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
    plain decoding at this load, and 100 ms. rounds is the same between the ends of two rounds, as
    the coordinator sees them, without what a busy machine does to clients and HTTP. before is the longest that ended in
    the two seconds before it, and rounds_before likewise: what the load itself does. stall is the longest until all was
    well again, with the start of another process beside the streams.
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
        "rounds_before_s": None if fault.rounds is None else fault.rounds.before_s,
        "rounds_s": None if fault.rounds is None else fault.rounds.after_s,
        "bar_s": bar_s,
        "within": _within(gap_s, bar_s),
        "rounds_within": None if fault.rounds is None else _within(fault.rounds.after_s, bar_s),
        "stall_s": _stall_s(fault, outcome),
        "recovery_s": None if fault.recovered_s is None else fault.recovered_s - fault.began_s,
    }


def _within(time_s: float, bar_s: float | None) -> str | None:
    return None if bar_s is None else "yes" if time_s <= bar_s else "NO"


def _bar_s(outcome: Outcome) -> float | None:
    return None if outcome.plain_step_s is None else outcome.plain_step_s + DRAFT_KILL_SLACK_S


def _longest_gap_s(outcome: Outcome, from_s: float, to_s: float) -> float:
    return max((seen.longest_gap_s(from_s, to_s) for seen in outcome.streams), default=0.0)


def _longest_whole_gap_s(outcome: Outcome, from_s: float, to_s: float) -> float:
    """Of those that ended between these two times."""
    pairs = (pair for seen in outcome.streams for pair in pairwise(seen.at))
    return max((after - before for before, after in pairs if from_s <= after <= to_s), default=0.0)


def draft_kills_together(outcome: Outcome) -> list[Row]:
    """A row for each time that `draft_kills` tells: the median and the longest of all, and how many kept the bar."""
    kills = draft_kills(outcome)
    return [_together(name, kills, outcome) for name in _TIMES] if kills else []


def _together(name: str, kills: Sequence[Row], outcome: Outcome) -> Row:
    found = [value for kill in kills if isinstance(value := kill[f"{name}_s"], float)]
    bar_s = _bar_s(outcome) if name in _BARRED else None
    return {
        "time": name,
        "kills": len(found),
        "p50_s": quantile(found, 0.5),
        "max_s": max(found, default=None),
        "plain_step_s": outcome.plain_step_s,
        "bar_s": bar_s,
        "within": None if bar_s is None else sum(value <= bar_s for value in found),
    }


def lost_draft(trace: dict[str, Any]) -> LostDraft | None:
    """What a timeline tells of the last time without a draft, of a second or more; None where there was none.

    It begins with the end of the draft before it, which the coordinator's clock says: no clock of ours is needed.
    """
    drafts = sorted(_spans(trace, "draft round trip").values())
    absences = [end for (_, end), (after, _) in pairwise(drafts) if after - end >= _ABSENT_S]
    if not absences:
        return None
    lost_s = absences[-1]
    gaps = list(pairwise(sorted(round_ends(trace).values())))
    return LostDraft(
        before_s=max((b - a for a, b in gaps if lost_s - _NOTICED_S <= b <= lost_s), default=0.0),
        after_s=max((b - a for a, b in gaps if b > lost_s and a < lost_s + _NOTICED_S), default=0.0),
    )


def round_ends(trace: dict[str, Any]) -> dict[int, float]:
    """When each round of a timeline ended, by its number, in seconds from the timeline's beginning."""
    return {number: end for number, (_, end) in _spans(trace, "target round trip").items()}


def _spans(trace: dict[str, Any], title: str) -> dict[int, tuple[float, float]]:
    """Beginnings and ends of one track of a timeline, by the number of the batch."""
    events = trace["traceEvents"]
    (track,) = (each["tid"] for each in events if each["ph"] == "M" and each["args"]["name"] == title)
    return {
        int(each["name"].rpartition(" ")[2]): (each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6)
        for each in events
        if each["ph"] == "X" and each["tid"] == track
    }


def blame(seen: Seen, faults: Sequence[Fault]) -> Fault | None:
    """The fault because of which a stream did not finish: the last of its life that may cost streams, or the last one.

    A client may hear of a request that was lost with its ingress only when its time is over.
    """
    if seen.end == "finished":
        return None
    before = [fault for fault in faults if fault.began_s <= seen.ended_s]
    costly = [fault for fault in before if fault.may_cost_streams and fault.end_s >= seen.began_s]
    found = costly or before
    return found[-1] if found else None


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
    return fault is None or not fault.may_cost_streams
