"""`specserve bench chaos`: processes of a real deployment are killed, stopped, slowed and cut off under open streams.

Which fault comes next, to which role, and after which pause is drawn from a seed. Before the first one, the server is
asked for every text undisturbed; from then on each stream has to end once with that text (`watched`). A fault counts
as over when the process is another where it was to be replaced, and the pipeline says that all is well.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from specserve import config as configs
from specserve.bench.faults import KINDS, alive, titled
from specserve.bench.load import quantile
from specserve.bench.report import Row
from specserve.bench.watched import Ask, Seen, expectations, keep_asking
from specserve.config import Config
from specserve.errors import ConfigError

Progress = Callable[[str], None]

ROLES: Final = ("draft", "target", "coordinator", "ingress")
_REPLACED: Final = frozenset({"kill", "stop"})
_MAY_FAIL: Final = frozenset({"ingress"})
"""Streams may end before their time where this is hurt: a socket cannot be moved to another process."""

_POLL_S: Final = 0.05
_LONGEST_RECOVERY_S: Final = 120.0
_SETTLE_S: Final = 20.0
INGRESSES: Final = 2


@dataclass(frozen=True, slots=True)
class Options:
    """What to do. profile is that of emulated devices, or `demo` for the real pair; seconds is how long faults come.

    hold_s is how long a process is slow or cut off; pauses between faults are drawn up to pause_s.
    """

    profile: str = "qwen3-32b-0.6b-h100"
    clients: int = 32
    seconds: float = 120.0
    seed: int = 0
    kinds: tuple[str, ...] = tuple(KINDS)
    roles: tuple[str, ...] = ROLES
    max_tokens: int = 400
    hold_s: float = 4.0
    pause_s: float = 3.0

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        for flag, given, known in (("--kinds", self.kinds, KINDS), ("--roles", self.roles, ROLES)):
            if not given or set(given) - set(known):
                raise ConfigError(f"{flag} takes any of {', '.join(known)}; found {', '.join(given) or 'nothing'}")
        if self.clients < 1 or self.max_tokens < 2:
            raise ConfigError("--clients must be at least 1, and --max-tokens at least 2")
        if min(self.seconds, self.hold_s, self.pause_s) <= 0:
            raise ConfigError("--seconds, --hold and --pause must be above 0")


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to whom, and when it began and was over, in seconds of the monotonic clock.

    recovered_s is None where it was not over in two minutes.
    """

    kind: str
    role: str
    began_s: float
    recovered_s: float | None


@dataclass(slots=True)
class Outcome:
    """All that was seen. left is what was still held when every stream had ended, by metric."""

    faults: list[Fault] = field(default_factory=list)
    streams: list[Seen] = field(default_factory=list)
    wrong: list[Seen] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    recomputed: float = 0.0

    def note(self, seen: Seen, expected: str) -> None:
        """A stream ended."""
        self.streams.append(seen)
        if seen.wrong(expected):
            self.wrong.append(seen)

    def during(self, fault: Fault) -> list[Seen]:
        """The streams of which some part lies between the beginning and the end of a fault."""
        end_s = fault.began_s + _LONGEST_RECOVERY_S if fault.recovered_s is None else fault.recovered_s
        return [seen for seen in self.streams if seen.ended_s >= fault.began_s and seen.began_s <= end_s]


def measure(options: Options, progress: Progress) -> Outcome:
    """Deploy, ask, and do harm. Raises ConfigError, or SpecserveError where it does not serve before any fault."""
    from specserve.cluster.launch import running

    options.check()
    progress("starting Ray")
    deployment = configs.parse(settings_of(options.profile, options.clients), where="bench chaos")
    with running(deployment) as (url, config):
        return asyncio.run(disturb(url, config, options, progress))


def settings_of(profile: str, clients: int) -> dict[str, Any]:
    """A deployment for so many clients, and with answers whose text is determined. Raises ConfigError."""
    from specserve.models import _device_profile

    if profile == "demo":
        # Without it, the shape of a batch alone may flip a choice of a real model.
        settings: dict[str, Any] = {"engine.batch_invariant": True}
    else:
        settings = _device_profile.settings(profile)
    settings |= {
        "server.port": 0,
        "server.max_inflight": max(512, 2 * clients),
        "engine.queue_limit": max(256, clients),
        "cluster.ingress_replicas": INGRESSES,
    }
    tree = configs.override({}, settings)
    assert isinstance(tree, dict)
    return tree


async def disturb(url: str, config: Config, options: Options, progress: Progress) -> Outcome:
    """Ask a deployment of this Ray, and do harm to its processes."""
    asks = Ask.all_of(config.served_name, options.max_tokens)
    outcome = Outcome()
    limits = httpx.Limits(max_connections=None)
    # An answer's own connection tells of its own process only.
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, headers={"connection": "close"}) as client:
        progress("asking for every text undisturbed")
        expected = await expectations(client, asks)
        before = _refilled(await _metrics(client))
        progress(f"{options.clients} clients; faults for {options.seconds:g} s")
        faults = _faults(options, outcome, progress)
        await keep_asking(client, asks, options.clients, faults, lambda n, seen: outcome.note(seen, expected[n]))
        outcome.left = await left_over(client)
        outcome.recomputed = _refilled(await _metrics(client)) - before
    return outcome


async def _faults(options: Options, outcome: Outcome, progress: Progress) -> None:
    chance = random.Random(options.seed)
    cases = list(product(options.kinds, options.roles))
    end_s = time.monotonic() + options.seconds
    while time.monotonic() < end_s:
        await asyncio.sleep(chance.uniform(0.3, 1.0) * options.pause_s)
        kind, role = chance.choice(cases)
        fault = await asyncio.to_thread(_inflict, kind, role, chance.random(), options.hold_s)
        outcome.faults.append(fault)
        progress(f"{kind} {role}: {_told(fault)}")


def _told(fault: Fault) -> str:
    return "never recovered" if fault.recovered_s is None else f"{fault.recovered_s - fault.began_s:.2f} s"


def _inflict(kind: str, role: str, which: float, hold_s: float) -> Fault:
    """Do it, and wait until all is well again."""
    pids = _pids(role)
    pid = pids[int(which * len(pids))]
    began_s = time.monotonic()
    KINDS[kind](pid, hold_s)
    while time.monotonic() < began_s + _LONGEST_RECOVERY_S:
        time.sleep(_POLL_S)
        if _well(role, gone=pid if kind in _REPLACED else None):
            return Fault(kind, role, began_s, time.monotonic())
    return Fault(kind, role, began_s, None)


def _pids(role: str) -> list[int]:
    """The processes of a role."""
    from specserve.cluster.launch import pipeline_states

    if role == "ingress":
        return titled("ServeReplica:specserve:Ingress")
    return [state.pids[role] for state in pipeline_states() if role in state.pids]


def _well(role: str, gone: int | None) -> bool:
    """All is well, and no process of the role is the one that had to go."""
    from specserve.cluster.launch import pipeline_states

    states = pipeline_states()
    if not states or any(state.health.status != "ok" for state in states):
        return False
    pids = _pids(role)
    enough = len(pids) >= (INGRESSES if role == "ingress" else 1)
    return enough and gone not in pids and all(map(alive, pids))


async def _metrics(client: httpx.AsyncClient) -> str:
    reply = await client.get("/metrics")
    return reply.text


def _refilled(exposition: str) -> float:
    """Prompt positions that the target filled beyond the prompts of requests that ended."""
    found = {"specserve_prefill_tokens_total": 0.0, "specserve_prompt_tokens_total": 0.0}
    for name, _, value in _samples(exposition):
        if name in found:
            found[name] += value
    return found["specserve_prefill_tokens_total"] - found["specserve_prompt_tokens_total"]


def _samples(exposition: str) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(exposition)
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


async def left_over(client: httpx.AsyncClient) -> dict[str, float]:
    """What is still held, once there was time to give it back."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        left = held(await _metrics(client))
        if not left or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(_POLL_S)


def held(exposition: str) -> dict[str, float]:
    """Requests, slots and blocks that somebody holds, by metric; empty when all is given back."""
    found: dict[str, float] = {}
    for name, labels, value in _samples(exposition):
        counts = name in ("specserve_num_requests_running", "specserve_num_requests_waiting")
        held_slot = name == "specserve_slots" and labels["state"] != "free"
        held_block = name == "specserve_kv_blocks" and labels["state"] == "held"
        if value and (counts or held_slot or held_block):
            key = " ".join([name.removeprefix("specserve_"), *labels.values()])
            found[key] = found.get(key, 0.0) + value
    return found


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
    end_s = fault.began_s + _LONGEST_RECOVERY_S if fault.recovered_s is None else fault.recovered_s
    return max((seen.longest_gap_s(fault.began_s, end_s) for seen in outcome.during(fault)), default=0.0)


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
