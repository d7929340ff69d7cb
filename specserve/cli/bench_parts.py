"""Benches of parts by themselves, without a deployment: rules, exactness, gpu, coordinator."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.cli.bench import Findings, finds, json_argument, options_of, progress, settings_of
from specserve.cli.options import floats, names, numbers

if TYPE_CHECKING:
    from specserve.cli.options import Places


def add(benches: Places) -> None:
    """Add each bench with its arguments."""
    _add_rules(benches.add_parser("rules", help="cost of each verification rule against reading the logits once"))
    _add_exactness(benches.add_parser("exactness", help="what rules put out against the target's law, with plots"))
    _add_gpu(benches.add_parser("gpu", help="one device, no Ray: checks, times of steps, and the whole pipeline"))
    _add_coordinator(benches.add_parser("coordinator", help="cost of a round to the coordinator, without models"))


def _add_rules(rules: argparse.ArgumentParser) -> None:
    rules.add_argument("--batch", type=numbers, default=(1, 8, 64), help="rows; default: 1,8,64")
    rules.add_argument("--depth", type=numbers, default=(1, 4, 8), help="drafted tokens per row; default: 1,4,8")
    rules.add_argument(
        "--vocab", type=numbers, default=(32_000, 152_000), help="vocabulary sizes; default: 32000,152000"
    )
    rules.add_argument("--repeats", type=int, default=5, help="timed passes; medians are reported; default: 5")
    json_argument(rules, "versions and rows")
    finds(rules, _rules)


def _rules(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.rules import Options, measure

    options = options_of(Options, arguments)
    rows = measure(options, progress)
    return Findings(
        [("rules with sparse drafts; ratio is ms in units of reading the logits once", rows)], settings_of(options)
    )


def _add_exactness(exactness: argparse.ArgumentParser) -> None:
    exactness.add_argument("--tokens", type=int, default=200_000, help="tokens of each rule; default: 200000")
    exactness.add_argument("--plots", type=Path, help="also write pictures to this folder")
    exactness.add_argument("--acceptance", type=Path, help="with --plots: JSON of bench acceptance, drawn as well")
    exactness.set_defaults(verb=_exactness)


def _exactness(arguments: argparse.Namespace) -> int:
    from specserve.bench.exactness import measure, plot
    from specserve.bench.expectations import by_temperature
    from specserve.bench.report import show

    rows, expected = measure(arguments.tokens, progress), by_temperature()
    show("what comes out, against the target's law; a rule that is exact has a p-value from 0 to 1 by chance", rows)
    show("share of drafted tokens that rules keep, by exact expectation over pairs of models", expected)
    if arguments.plots is not None:
        for path in plot(rows, expected, arguments.acceptance, arguments.plots):
            print(f"wrote {path}")
    return 0


def _add_gpu(gpu: argparse.ArgumentParser) -> None:
    gpu.add_argument("--shape", default="8b", help="8b (random weights of 8B and 1B parameters) or tiny; default: 8b")
    gpu.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:0, …; default: auto")
    gpu.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="of the weights")
    gpu.add_argument("--rows", type=numbers, default=(1, 8, 32), help="requests at once; default: 1,8,32")
    gpu.add_argument("--depth", dest="depths", type=numbers, default=(1, 4), help="drafted tokens; default: 1,4")
    gpu.add_argument("--context", type=int, default=512, help="cached tokens of each timed row; default: 512")
    gpu.add_argument("--repeats", type=int, default=10, help="timed runs of each step; default: 10")
    gpu.add_argument("--max-tokens", type=int, default=48, help="tokens per answer; default: 48")
    json_argument(gpu, "versions, options and rows")
    finds(gpu, _gpu)


def _gpu(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.gpu import Options, measure

    options = options_of(Options, arguments)
    report = measure(options, progress)
    return Findings(
        [
            ("what must hold", report.checks),
            (f"steps of {options.shape} in {options.dtype} over {options.context} cached tokens", report.steps),
            ("the whole pipeline, made-up acceptance", report.pipeline),
        ],
        settings_of(options),
        broken=[str(row["check"]) for row in report.checks if row["holds"] != "yes"],
    )


def _add_coordinator(coordinator: argparse.ArgumentParser) -> None:
    modes = ("plain", "serial", "ahead1", "ahead12")
    coordinator.add_argument(
        "--modes", type=names, default=modes, help=f"any of {','.join(modes)}, which is the default"
    )
    coordinator.add_argument("--temperature", type=floats, default=(0.0, 1.0), help="temperatures; default: 0,1")
    coordinator.add_argument(
        "--batch", type=numbers, default=(1, 16, 64, 256), help="running requests; default: 1,16,64,256"
    )
    coordinator.add_argument("--context", type=int, default=500, help="tokens of each prompt; default: 500")
    coordinator.add_argument("--rounds", type=int, default=100, help="timed rounds of each; default: 100")
    json_argument(coordinator, "versions and rows")
    finds(coordinator, _coordinator)


def _coordinator(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.coordinator import Options, measure

    options = options_of(Options, arguments)
    rows = measure(options, progress)
    return Findings([("the coordinator's own processor time for a round", rows)], settings_of(options))
