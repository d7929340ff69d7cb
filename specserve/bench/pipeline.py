"""`specserve bench pipeline`: what drafting ahead is worth on emulated devices, through real Ray actors.

For each mode, batch and temperature: tokens/s in steady state, beside the limit that the devices alone would set at
the acceptance, hit rate and lengths that were measured (`limits`). Beside it stands how many steps of each device came
late, and how many were refused because they computed longer than their device would: what these cost is the host's, not
the devices', and figures with many of them mean little.

Each round of windows has texts of its own, the same for all cases. What a draft is worth differs from text to text: in
2,000 tokens of one, the share of kept drafts is off its mean by more than 0.01 in one of three. `acceptance` says what
it was in all of them.

plain    the target alone
serial   draft, then verify
ahead1   the draft goes on from "everything kept" while the target verifies
ahead    the draft prepares for as many outcomes of the verification as it has time for
adaptive likewise, drafted as deep as is measured to pay, and not at all where plain decoding is faster
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import Any

from specserve import config as configs
from specserve.bench.limits import Load, tokens_per_s
from specserve.bench.report import Row
from specserve.bench.steady import Ask, Counters, Server
from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models import _device_profile
from specserve.models._device_profile import DeviceProfile

Progress = Callable[[str], None]

_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"engine.outcomes": 0},
    "serial": {"engine.outcomes": 0},
    "ahead1": {"engine.outcomes": 1},
    "ahead": {"engine.outcomes": "auto"},
    "adaptive": {"engine.outcomes": "auto", "engine.depth_policy": "adaptive"},
}
"""How the engine is configured in each mode; modes of the same settings share a server."""

MODES = tuple(_SETTINGS)
DEFAULT_MODES = ("plain", "serial", "ahead1", "ahead")

_LONGEST = 8192
_WINDOW_TOKENS_PER_S = 600
"""What one request might get per second, at most: a window has to end before the answers do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. window_s is how long each case is looked at, in seconds; cases take turns in `rounds` rounds."""

    profile: str = "qwen3-32b-0.6b-h100"
    modes: tuple[str, ...] = DEFAULT_MODES
    batches: tuple[int, ...] = (1, 8, 32, 64)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    rule: str = "coupled"
    depths: tuple[int, ...] = (4,)
    acceptance: float = 0.78
    runner_up_hit: float = 0.9
    transport: str = "socket"
    window_s: float = 4.0
    rounds: int = 3

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if unknown := sorted(set(self.modes) - set(MODES)):
            raise ConfigError(f"no mode called {', '.join(unknown)}; there are: {', '.join(MODES)}")
        if not self.modes or not self.batches or min(self.batches) < 1:
            raise ConfigError("--modes takes names, --batch numbers from 1")
        if not self.temperatures or min(self.temperatures) < 0 or not self.depths or min(self.depths) < 1:
            raise ConfigError("--temperature takes numbers from 0, --depth numbers from 1")
        if self.rounds < 1:
            raise ConfigError(f"--rounds takes a number from 1, not {self.rounds}")
        if not 0 < self.window_s <= _LONGEST / _WINDOW_TOKENS_PER_S - 1:
            raise ConfigError(f"--window takes seconds up to {_LONGEST / _WINDOW_TOKENS_PER_S - 1:.0f}")


def measure(options: Options, progress: Progress) -> list[Row]:
    """One row for each mode, batch and temperature. Raises ConfigError, or the first error of a request."""
    options.check()
    profile = _device_profile.load(options.profile)
    rows: list[Row] = []
    for _, alike in groupby(sorted(options.modes, key=MODES.index), key=_SETTINGS.__getitem__):
        modes = list(alike)
        progress(f"starting Ray for {', '.join(modes)}")
        cases = list(_cases(modes, options))
        with _served(configured(options, modes[0])) as server:
            turns = [
                [_looked_at(server, *case, texts, options, progress) for case in cases]
                for texts in range(options.rounds)
            ]
        for (mode, ask), windows in zip(cases, zip(*turns, strict=True), strict=True):
            rows.append(_together(row_of(mode, ask, options, profile, Counters.sum(windows)), windows))
    return rows


def _together(row: Row, windows: Sequence[Counters]) -> Row:
    """The row of all windows of a case in one, and beside it the slowest of them, the middle one and the fastest."""
    speeds = [window.tokens / window.wall_s for window in windows]
    return {**row, "slowest": min(speeds), "median": median(speeds), "fastest": max(speeds)}


def _looked_at(server: Server, mode: str, ask: Ask, texts: int, options: Options, progress: Progress) -> Counters:
    progress(f"{mode}, batch {ask.rows}, temperature {ask.temperature:g}, depth {ask.depth}, texts {texts}")
    return server.measure(replace(ask, texts=texts), options.window_s)


def configured(options: Options, mode: str) -> Config:
    """The configuration of a server for these options and a mode. Raises ConfigError."""
    most = max(options.batches)
    settings: dict[str, Any] = _device_profile.settings(options.profile) | {
        "server.port": 0,
        "cluster.transport": options.transport,
        "engine.rule": options.rule,
        "engine.depth": max(options.depths),
        "engine.max_requests": most,
        "engine.max_batch_tokens": max(512, 4 * most * (max(options.depths) + 1) + 64),
        "target.emulated.strict": True,
        "draft.model.emulated.strict": True,
        "draft.model.emulated.acceptance": options.acceptance,
        "draft.model.emulated.runner_up_hit": options.runner_up_hit,
    }
    return configs.parse(configs.override({}, settings | _SETTINGS[mode]), where="bench pipeline")


@contextmanager
def _served(config: Config) -> Iterator[Server]:
    from specserve.cluster.launch import running

    with running(config) as (base_url, served):
        yield Server(base_url, served.served_name, _LONGEST)


def _cases(modes: Sequence[str], options: Options) -> Iterator[tuple[str, Ask]]:
    """Each case once."""
    for mode, batch, temperature, depth in product(modes, options.batches, options.temperatures, options.depths):
        if mode == "plain" and depth != options.depths[0]:
            continue
        yield mode, Ask(batch, temperature, 0 if mode == "plain" else depth)


def row_of(mode: str, ask: Ask, options: Options, profile: DeviceProfile, counted: Counters) -> Row:
    """What the counters of a window say about one case.

    acceptance is the share of drafted tokens that the target kept, of those that it got to. hit_rate is the share of
    outcomes that had been drafted for; overlap the share of the time in which both devices
    were busy. wire_ms is what a round's messages take both ways, all workers together; bytes_per_token counts what the
    coordinator and the workers exchange.
    """
    steps = counted.steps
    draft_steps = counted.draft_steps / counted.target_steps if counted.target_steps else 1.0
    load = Load(
        rows=ask.rows,
        tokens=counted.tokens / steps,
        drafted_share=counted.drafts / steps,
        drafted_tokens=counted.drafted / steps,
        draft_steps=draft_steps,
        in_turns=_in_turns(counted),
    )
    measured = counted.tokens / counted.wall_s
    limit = tokens_per_s(profile, mode, ask.depth, load)
    foreseen = counted.hits + counted.misses
    draft_busy, target_busy = counted.draft_s / counted.wall_s, counted.target_s / counted.wall_s
    return {
        "profile": Path(options.profile).name,
        "rule": options.rule,
        "temperature": ask.temperature,
        "batch": ask.rows,
        "mode": mode,
        "depth": ask.depth,
        "tokens_per_s": measured,
        "limit_tokens_per_s": limit,
        "efficiency": measured / limit,
        "hit_rate": counted.hits / foreseen if foreseen and mode not in ("plain", "serial") else None,
        "draft_busy": draft_busy,
        "target_busy": target_busy,
        "overlap": counted.overlap_s / counted.wall_s,
        "acceptance": counted.kept / (counted.kept + counted.refused) if counted.drafted else None,
        "tokens_per_step": load.tokens,
        "wire_ms": 1000 * counted.wire_s / counted.rounds if counted.rounds else None,
        "bytes_per_token": counted.bytes / counted.tokens,
        "transport": options.transport,
        **{name: int(getattr(counted, name)) for name in _STEPS},
    }


def _in_turns(counted: Counters) -> float:
    """The share of rounds that waited for their drafts: there rows have one that was foreseen by no outcome."""
    return min(1.0, max(0.0, counted.drafts - counted.hits) / counted.steps)


_STEPS = ("draft_steps", "draft_late", "draft_refused", "target_steps", "target_late", "target_refused")

_HEADINGS = {
    "temperature": "T",
    "tokens_per_s": "tokens/s",
    "limit_tokens_per_s": "limit",
    "tokens_per_step": "per step",
}


_SAME = ("profile", "transport", "rule")


def table(rows: list[Row]) -> list[Row]:
    """The rows as people read them: without what is the same in all, under headings that fit."""
    hidden = (*_SAME, *_STEPS)
    return [
        {**{_HEADINGS.get(key, key): row[key] for key in row if key not in hidden}, **_overruns(row)} for row in rows
    ]


def _overruns(row: Row) -> Row:
    """How many steps of each device came late and were refused, of how many."""
    return {
        f"{role} late, refused": f"{row[f'{role}_late']}, {row[f'{role}_refused']} of {row[f'{role}_steps']}"
        for role in ("draft", "target")
    }


def plot(rows: list[Row], path: Path) -> None:
    """Draw tokens/s by batch, one panel per temperature, one line per mode, its limit dashed. Raises ConfigError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib, or the extra specserve[plot]") from None
    temperatures = sorted({row["temperature"] for row in rows}, key=float)  # type: ignore[arg-type]
    figure = Figure(figsize=(4.5 * len(temperatures), 4), layout="constrained")
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        _draw(panel, [row for row in rows if row["temperature"] == temperature])
        panel.set_title(f"{rows[0]['profile']}, T = {temperature:g}")
    panels[0].set_ylabel("tokens/s (dashed: limit of the devices)")
    panels[0].legend()
    figure.savefig(path)


def _draw(panel: Any, rows: list[Row]) -> None:
    for color, mode in enumerate(MODES):
        points = [row for row in rows if row["mode"] == mode]
        batches = [row["batch"] for row in points]
        if points:
            panel.plot(batches, [row["tokens_per_s"] for row in points], f"C{color}o-", label=mode)
            panel.plot(batches, [row["limit_tokens_per_s"] for row in points], f"C{color}--", linewidth=1)
    panel.set(xscale="log", yscale="log", xlabel="requests at once")
