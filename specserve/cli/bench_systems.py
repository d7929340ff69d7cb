"""Benches of the whole system on emulated devices, or of a running server: pipeline, load, chaos, scale, soak."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.cli.bench import Findings, finds, json_argument, options_of, progress, settings_of
from specserve.cli.options import floats, names, numbers

if TYPE_CHECKING:
    from specserve.cli.options import Places

_PROFILE = "qwen3-32b-0.6b-h100"


def add(benches: Places) -> None:
    """Add each bench with its arguments."""
    _add_pipeline(benches.add_parser("pipeline", help="what drafting ahead is worth, on emulated devices and Ray"))
    _add_load(benches.add_parser("load", help="what clients see under load, and what the HTTP side costs"))
    _add_chaos(benches.add_parser("chaos", help="kill, stop, slow and cut off processes under open streams"))
    _add_scale(benches.add_parser("scale", help="throughput by number of pipelines, and ways of routing to them"))
    _add_soak(benches.add_parser("soak", help="memory, files and shared memory over minutes of mixed load"))


def _add_pipeline(pipeline: argparse.ArgumentParser) -> None:
    modes = ("plain", "serial", "ahead1", "ahead")
    pipeline.add_argument("--transport", choices=("socket", "ray"), default="socket", help="default: socket")
    pipeline.add_argument("--profile", default=_PROFILE, help="device profile: a name or a .json file")
    pipeline.add_argument("--modes", type=names, default=modes, help=f"default: {','.join(modes)}; also: adaptive")
    pipeline.add_argument(
        "--batch", dest="batches", metavar="BATCH", type=numbers, default=(1, 8, 32, 64),
        help="requests; default: 1,8,32,64",
    )  # fmt: skip
    pipeline.add_argument(
        "--temperature", dest="temperatures", metavar="TEMPERATURE", type=floats, default=(0.0, 0.7, 1.0),
        help="default: 0,0.7,1",
    )  # fmt: skip
    pipeline.add_argument("--rule", default="coupled", help="verification rule; default: coupled")
    pipeline.add_argument(
        "--depth", dest="depths", metavar="DEPTH", type=numbers, default=(4,),
        help="drafted tokens per round; default: 4",
    )  # fmt: skip
    pipeline.add_argument("--acceptance", type=float, default=0.78, help="of the emulated draft; default: 0.78")
    pipeline.add_argument(
        "--runner-up-hit", type=float, default=0.9, help="its runners-up, where its first is wrong; default: 0.9"
    )
    pipeline.add_argument(
        "--window", dest="window_s", metavar="WINDOW", type=float, default=4.0,
        help="seconds that each case is measured; default: 4",
    )  # fmt: skip
    pipeline.add_argument("--rounds", type=int, default=3, help="of windows, each with texts of its own; default: 3")
    json_argument(pipeline, "versions and rows")
    pipeline.add_argument("--plot", type=Path, help="also draw tokens/s and limits into this file, e.g. a .png or .svg")
    finds(pipeline, _pipeline)


def _pipeline(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.pipeline import Options, measure, plot, table

    options = options_of(Options, arguments)
    rows = measure(options, progress)
    about = f"acceptance {options.acceptance:g}, runner-up hit {options.runner_up_hit:g}"
    return Findings(
        [(f"{options.profile}, {options.rule}: {about}", table(rows))], settings_of(options), rows, partial(plot, rows)
    )


def _add_load(load: argparse.ArgumentParser) -> None:
    load.add_argument("--url", help="a running server; default: one of emulated devices on a Ray of its own")
    load.add_argument("--profile", default=_PROFILE, help="device profile: a name or a .json file")
    load.add_argument("--clients", type=numbers, default=(1, 8, 64), help="closed loop, clients; default: 1,8,64")
    load.add_argument("--rates", type=floats, default=(4.0,), help="open loop, requests a second; default: 4")
    load.add_argument("--seconds", type=float, default=10.0, help="how long each load comes; default: 10")
    load.add_argument("--max-tokens", type=int, default=128, help="longest answer; default: 128")
    load.add_argument("--queue", type=int, default=256, help="that may wait for one of its 64 places; default: 256")
    json_argument(load, "versions, options and rows")
    load.add_argument("--plot", type=Path, help="draw the rows to this file (.png, .svg, .pdf)")
    finds(load, _load)


def _load(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.load import Options, measure, plot

    options = options_of(Options, arguments)
    rows = measure(options, progress)
    title = f"{options.url or options.profile}: times as clients see them; good: first token in 0.5 s, 50 ms a token"
    return Findings([(title, rows)], settings_of(options), plot=partial(plot, rows))


def _add_chaos(chaos: argparse.ArgumentParser) -> None:
    kinds, roles = ("kill", "stop", "slow", "cut", "starve"), ("draft", "target", "coordinator", "ingress")
    chaos.add_argument("--profile", default=_PROFILE, help="a profile of emulated devices, or demo")
    chaos.add_argument("--clients", type=int, default=32, help="streams at once; default: 32")
    chaos.add_argument("--seconds", type=float, default=120.0, help="how long faults come; default: 120")
    chaos.add_argument("--faults", type=int, default=1, help="at least so many, however long that takes; default: 1")
    chaos.add_argument("--seed", type=int, default=0, help="of the faults and their times; default: 0")
    chaos.add_argument("--kinds", type=names, default=kinds, help=f"any of {','.join(kinds)}, the default")
    chaos.add_argument("--roles", type=names, default=roles, help=f"any of {','.join(roles)}, the default")
    chaos.add_argument("--max-tokens", type=int, default=400, help="tokens per answer, exactly; default: 400")
    chaos.add_argument(
        "--hold", dest="hold_s", metavar="HOLD", type=float, default=4.0,
        help="seconds that slow and cut last; default: 4",
    )  # fmt: skip
    chaos.add_argument(
        "--pause", dest="pause_s", metavar="PAUSE", type=float, default=3.0,
        help="longest pause between two faults; default: 3",
    )  # fmt: skip
    json_argument(chaos, "versions, options and rows")
    finds(chaos, _chaos)


def _chaos(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.chaos import Options, measure
    from specserve.bench.chaos_report import broken, draft_kills, draft_kills_together, rows, summary

    options = options_of(Options, arguments)
    outcome = measure(options, progress)
    found, whole = rows(outcome), summary(outcome)
    kills, together = draft_kills(outcome), draft_kills_together(outcome)
    return Findings(
        [
            (f"{options.profile}, {options.clients} clients: faults by role and kind", found),
            *([("each kill of a draft worker", kills), ("all kills of draft workers", together)] if kills else []),
            ("the whole run", [whole]),
        ],
        settings_of(options) | {"whole": whole, "draft_kills": kills, "draft_kills_together": together},
        found,
        broken=broken(outcome),
    )


def _add_scale(scale: argparse.ArgumentParser) -> None:
    scale.add_argument("--profile", default=_PROFILE, help=f"devices; default: {_PROFILE}")
    scale.add_argument("--pipelines", type=numbers, default=(1, 2, 4), help="numbers of pipelines; default: 1,2,4")
    scale.add_argument("--clients", type=int, default=16, help="clients for each pipeline; default: 16")
    scale.add_argument("--seconds", type=float, default=10.0, help="length of each case; default: 10")
    scale.add_argument("--max-tokens", type=int, default=128, help="longest answer; default: 128")
    routing = ("prefix", "least_loaded", "round_robin")
    scale.add_argument("--routing", type=names, default=routing, help=f"ways of routing; default: {','.join(routing)}")
    scale.add_argument("--routing-pipelines", type=int, default=2, help="pipelines to route to; default: 2")
    scale.add_argument("--prefixes", type=int, default=8, help="shared beginnings of prompts; default: 8")
    scale.add_argument("--prefix-tokens", type=int, default=1024, help="their length; default: 1024")
    json_argument(scale, "versions, options and rows")
    finds(scale, _scale)


def _scale(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.scale import Options, measure

    options = options_of(Options, arguments)
    results = measure(options, progress)
    return Findings(
        [
            (f"{options.profile}: tokens/s, and shares of a core per process", results.throughput),
            (f"{options.prefixes} shared beginnings of {options.prefix_tokens} tokens", results.routing),
            ("what larger deployments need, by the constants of this run", results.model),
        ],
        settings_of(options),
    )


def _add_soak(soak: argparse.ArgumentParser) -> None:
    soak.add_argument("--profile", default=_PROFILE, help="a profile of emulated devices, or demo")
    soak.add_argument("--clients", type=int, default=16, help="streams at once; default: 16")
    soak.add_argument("--minutes", type=float, default=30.0, help="how long; default: 30")
    soak.add_argument(
        "--warm-up", dest="warm_up_s", metavar="WARM_UP", type=float, default=60.0,
        help="seconds before the first look; default: 60",
    )  # fmt: skip
    soak.add_argument("--max-tokens", type=int, default=200, help="tokens per answer, exactly; default: 200")
    soak.add_argument(
        "--growth", dest="most_growth", metavar="GROWTH", type=float, default=0.02,
        help="share that a process may grow; default: 0.02",
    )  # fmt: skip
    json_argument(soak, "versions, options and rows")
    finds(soak, _soak)


def _soak(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.soak import Options, broken, course, measure, rows, summary

    options = options_of(Options, arguments)
    outcome = measure(options, progress)
    found, whole = rows(outcome), summary(outcome)
    return Findings(
        [
            (f"{options.profile}, {options.clients} clients, {options.minutes:g} minutes", found),
            ("the whole run", [whole]),
        ],
        settings_of(options) | {"whole": whole, "resident_mib_by_minute": course(outcome)},
        found,
        broken=broken(outcome, options.most_growth),
    )
