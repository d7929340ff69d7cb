"""What a large deployment needs, from constants measured on a small one. Pure arithmetic; see docs/scale.md.

An event is what one round brings one request. Each event costs processor time in the coordinator, an ingress and
Serve's proxy. Besides, each ingress keeps a channel to each pipeline, which costs both ends time when nothing happens:
beats there and back, and a question about health.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specserve.bench.report import Row

PIPELINES = (1, 10, 100, 300, 1000)
FULL = 0.7
"""The share of a core to which processes are filled: beyond it, queues show in latencies."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: events/s over all pipelines, and shares of a core per process, at rest and under load, by kind."""

    pipelines: int
    events_s: float
    idle: Mapping[str, float]
    busy: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds of a core for each event in each kind of process, and per second for each channel at rest.

    events_s is what one pipeline makes; rest is what an ingress takes without any pipeline.
    """

    events_s: float
    proxy_s: float
    ingress_s: float
    coordinator_s: float
    coordinator_rest: float
    channel: float
    rest: float


def fitted(samples: Sequence[Sample]) -> Constants:
    """The constants behind these runs, one ingress and one proxy in each. At least one run."""
    events = sum(sample.events_s for sample in samples)

    def per_event(side: str, processes: str = "one") -> float:
        used = sum(
            max(0.0, sample.busy[side] - sample.idle[side]) * (1 if processes == "one" else sample.pipelines)
            for sample in samples
        )
        return used / events if events else 0.0

    channel, rest = _line([(sample.pipelines, sample.idle["ingress"]) for sample in samples])
    return Constants(
        events_s=events / sum(sample.pipelines for sample in samples),
        proxy_s=per_event("proxy"),
        ingress_s=per_event("ingress"),
        coordinator_s=per_event("coordinator", "each"),
        coordinator_rest=sum(sample.idle["coordinator"] for sample in samples) / len(samples),
        channel=channel,
        rest=rest,
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope, not below 0, and height at 0 of the line nearest to the points. One point gives a line through 0."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return mean_y / mean_x, 0.0
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
    return slope, max(0.0, mean_y - slope * mean_x)


def needed(constants: Constants, pipelines: Sequence[int] = PIPELINES) -> list[Row]:
    """A row for each size: ingresses and proxies for its events, and what the channels at rest take of an ingress.

    ingresses is None where every ingress would be full of channels alone: there, each may only know a part of the
    pipelines. part is how many it may know so that channels take a tenth of a core.
    """
    return [_row(constants, count) for count in pipelines]


def _row(constants: Constants, pipelines: int) -> Row:
    events_s = pipelines * constants.events_s
    channels = pipelines * constants.channel
    free = FULL - constants.rest - channels
    ingresses = max(1.0, events_s * constants.ingress_s / free) if free > 0 else None
    coordinator = constants.coordinator_rest + constants.events_s * constants.coordinator_s
    return {
        "pipelines": pipelines,
        "events_s": events_s,
        "proxies": max(1.0, events_s * constants.proxy_s / FULL),
        "ingresses": ingresses,
        "channels_core": channels,
        "part": int(0.1 / constants.channel) if constants.channel > 0 else None,
        "coordinator_core": coordinator,
    }
