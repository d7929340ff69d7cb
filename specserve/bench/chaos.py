"""`specserve bench chaos`: processes of a real deployment are killed, stopped, slowed and cut off under open streams.

Which fault comes next, to which role, and after which pause is drawn from a seed; each comes once before any comes
again. Before the first one, the server is
asked for every text undisturbed; from then on each stream has to end once with that text (`watched`). A fault counts
as over when the process is another where it was to be replaced, and the pipeline says that all is well.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from specserve import config as configs
from specserve.bench.chaos_report import LONGEST_RECOVERY_S, Fault, Outcome, lost_draft, round_ends
from specserve.bench.faults import KINDS, alive, go_on, titled
from specserve.bench.load import quantile
from specserve.bench.watched import Ask, expectations, keep_asking
from specserve.config import Config
from specserve.errors import ConfigError, Unavailable

Progress = Callable[[str], None]

ROLES: Final = ("draft", "target", "coordinator", "ingress")
_REPLACED: Final = frozenset({"kill", "stop"})
_POLL_S: Final = 0.05
_DRAFTS_AGAIN_S: Final = 1.0  # a worker that is back drafts at once; the time without drafts then has an end
_SETTLE_S: Final = 20.0
_LEAVES_S: Final = 60.0
_PLAIN_TOKENS: Final = 32
_PLAIN_S: Final = 4.0
INGRESSES: Final = 2


@dataclass(frozen=True, slots=True)
class Options:
    """What to do. profile is that of emulated devices, or `demo` for the real pair; seconds is how long faults come.

    hold_s is how long a process is slow or cut off; pauses between faults are drawn up to pause_s. At least so many
    `faults` come, however long that takes.
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
    faults: int = 1

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        for flag, given, known in (("--kinds", self.kinds, KINDS), ("--roles", self.roles, ROLES)):
            if not given or set(given) - set(known):
                raise ConfigError(f"{flag} takes any of {', '.join(known)}; found {', '.join(given) or 'nothing'}")
        if min(self.clients, self.faults) < 1 or self.max_tokens < 2:
            raise ConfigError("--clients and --faults must be at least 1, and --max-tokens at least 2")
        if min(self.seconds, self.hold_s, self.pause_s) <= 0:
            raise ConfigError("--seconds, --hold and --pause must be above 0")


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
        progress("asking without drafts")
        outcome.plain_step_s = await _plain_step_s(client, asks, options.clients)
        before = recomputed(await _metrics(client))
        progress(f"{options.clients} clients; faults for {options.seconds:g} s")
        faults = _faults(client, options, outcome, progress)
        await keep_asking(client, asks, options.clients, faults, lambda n, seen: outcome.note(seen, expected[n]))
        outcome.left = await left_over(client)
        outcome.recomputed = recomputed(await _metrics(client)) - before
    return outcome


async def _plain_step_s(client: httpx.AsyncClient, asks: Sequence[Ask], clients: int) -> float | None:
    """The median time between the ends of two rounds without drafts, with as many clients as there will be.

    So it is a step at this load, with prompts beside it and clients that come and go. The coordinator's clock says it:
    clients of a full machine get several events at once, and the time between two of those is no step.
    """
    plain = [
        Ask(ask.body | {"max_tokens": _PLAIN_TOKENS, "speculation": ask.body.get("speculation", {}) | {"depth": 0}})
        for ask in asks
    ]
    before = round_ends(await _timeline(client))
    await keep_asking(client, plain, clients, asyncio.sleep(_PLAIN_S), lambda *_: None)
    ends = [end_s for number, end_s in round_ends(await _timeline(client)).items() if number > max(before, default=-1)]
    return quantile([after - end for end, after in pairwise(sorted(ends))], 0.5)


async def _timeline(client: httpx.AsyncClient) -> dict[str, Any]:
    trace: dict[str, Any] = (await client.get("/timeline.json")).json()
    return trace


async def _faults(client: httpx.AsyncClient, options: Options, outcome: Outcome, progress: Progress) -> None:
    chance = random.Random(options.seed)
    end_s = time.monotonic() + options.seconds
    for kind, role in cases(options, chance):
        if time.monotonic() >= end_s and len(outcome.faults) >= options.faults:
            return
        await asyncio.sleep(chance.uniform(0.3, 1.0) * options.pause_s)
        fault = await asyncio.to_thread(_inflict, kind, role, chance.random(), options.hold_s)
        if (kind, role) == ("kill", "draft") and fault.recovered_s is not None:
            await asyncio.sleep(_DRAFTS_AGAIN_S)
            fault = replace(fault, rounds=lost_draft(await _timeline(client)))
        outcome.faults.append(fault)
        progress(f"{kind} {role}: {_told(fault)}")


def cases(options: Options, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Kinds and roles without end: all pairs in an order that is drawn, and then again in another one."""
    pairs = list(product(options.kinds, options.roles))
    while True:
        yield from chance.sample(pairs, len(pairs))


def _told(fault: Fault) -> str:
    return "never recovered" if fault.recovered_s is None else f"{fault.recovered_s - fault.began_s:.2f} s"


def _inflict(kind: str, role: str, which: float, hold_s: float) -> Fault:
    """Do it, and wait until all is well again. Raises Unavailable where there is nobody to do it to."""
    end_s = time.monotonic() + LONGEST_RECOVERY_S
    while not (pids := _pids(role)):  # a pipeline that is asked at a bad moment names nobody
        if time.monotonic() > end_s:
            raise Unavailable(f"there is no {role} process")
        time.sleep(_POLL_S)
    pid = pids[int(which * len(pids))]
    began_s = time.monotonic()
    try:
        KINDS[kind](pid, hold_s)
        while time.monotonic() < began_s + LONGEST_RECOVERY_S:
            time.sleep(_POLL_S)
            if _well(role, gone=pid if kind in _REPLACED else None):
                return Fault(kind, role, began_s, time.monotonic())
        return Fault(kind, role, began_s, None)
    finally:
        if kind == "stop":
            go_on(pid)
            _let_leave(pid)


def _let_leave(pid: int) -> None:
    """Wait for a process that has a successor, and ends what it had begun: the next fault is to hurt who serves."""
    end_s = time.monotonic() + _LEAVES_S
    while alive(pid) and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def _pids(role: str) -> list[int]:
    """The processes of a role."""
    from specserve.cluster.launch import pipeline_states

    if role == "ingress":
        return titled("ServeReplica:specserve:Ingress")
    return [state.pids[role] for state in pipeline_states() if role in state.pids]


def _well(role: str, gone: int | None) -> bool:
    """All is well, without the process that had to go. Serve leaves a stuck HTTP process alone beside its successor."""
    from specserve.cluster.launch import pipeline_states, running_ingresses

    states = pipeline_states()
    if not states or any(state.health.status != "ok" for state in states):
        return False
    pids = [pid for pid in _pids(role) if pid != gone]
    enough = min(len(pids), running_ingresses()) >= INGRESSES if role == "ingress" else bool(pids)
    return enough and all(map(alive, pids))


async def _metrics(client: httpx.AsyncClient) -> str:
    reply = await client.get("/metrics")
    return reply.text


def recomputed(exposition: str) -> float:
    """Positions that targets computed again."""
    return sum(value for name, _, value in _samples(exposition) if name == "specserve_recomputed_tokens_total")


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
