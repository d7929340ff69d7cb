"""Benches of a configuration's own models: compare, acceptance, ties, speculators, prefix, metrics, curves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.cli.bench import Findings, finds, json_argument, options_of, progress, settings_of
from specserve.cli.options import config_arguments, floats, names, numbers, runnable_config, servers_or_folder

if TYPE_CHECKING:
    from specserve.cli.options import Places


def add(benches: Places) -> None:
    """Add each bench with its arguments."""
    _add_compare(
        benches.add_parser("compare", help="depth 0 against depth k, in process, through Ray, and transformers")
    )
    _add_peer_env(benches.add_parser("peer-env", help="make another engine's environment, and the models in its form"))
    _add_acceptance(benches.add_parser("acceptance", help="drafted tokens that each rule keeps on a pair of models"))
    _add_ties(benches.add_parser("ties", help="how often the shape of a batch alone flips a choice of the target"))
    _add_speculators(benches.add_parser("speculators", help="drafted tokens that each speculator keeps, by kind"))
    _add_prefix(benches.add_parser("prefix", help="first tokens warm against cold, and what prompts cost the others"))
    _add_metrics(benches.add_parser("metrics", help="throughput with metrics on against off, and with traces"))
    _add_curves(benches.add_parser("curves", help="cost of a target's step by context and requests, on a CPU"))


def _add_compare(compare: argparse.ArgumentParser) -> None:
    config_arguments(compare)
    compare.add_argument("--concurrency", type=numbers, default=(1, 8), help="requests at a time; default: 1,8")
    compare.add_argument("--depth", dest="depths", type=numbers, default=(0, 4), help="depths; default: 0,4")
    systems = ("transformers", "local", "ray")
    compare.add_argument(
        "--systems", type=names, default=systems, help=f"any of {','.join(systems)}, which is the default"
    )
    compare.add_argument(
        "--speculators",
        type=names,
        default=("small_model", "ngram"),
        help="in-process speculators to compare, names of files in drafting/; default: small_model,ngram",
    )
    compare.add_argument("--prompts", type=int, default=8, help="how many of the shipped prompts; default: 8")
    compare.add_argument("--max-tokens", type=int, default=32, help="tokens per answer, exactly; default: 32")
    compare.add_argument(
        "--passes", type=int, default=2, help="interleaved repetitions; medians are reported; default: 2"
    )
    compare.add_argument(
        "--peers",
        type=servers_or_folder,
        default=(),
        help="other engines: a folder with their environments (see peer-env), each of which is then started, or "
        "servers that run already, as NAME=URL,…; asked by OpenAI's completions API",
    )
    compare.add_argument("--peer-names", type=names, default=(), help="peers of that folder to start; default: all")
    json_argument(compare, "versions, config and rows")
    finds(compare, _compare)


def _compare(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.compare import Options, compare

    config, options = runnable_config(arguments), options_of(Options, arguments)
    rows = compare(config, options, progress)
    title = f"{config.served_name}: greedy, {options.prompts} prompts × {options.max_tokens} tokens"
    return Findings([(title, rows)], settings_of(options, config))


def _add_peer_env(peer_env: argparse.ArgumentParser) -> None:
    from specserve import folders

    known = folders.names_in("bench.peer_servers")
    peer_env.add_argument("peer", metavar="NAME", help=f"one of {', '.join(known)}, or a dotted path of your own")
    peer_env.add_argument("folder", type=Path, help="where environments lie, and models in the engines' own forms")
    config_arguments(peer_env)
    finds(peer_env, _peer_env)


def _peer_env(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.peer_environments import made

    config = runnable_config(arguments)
    rows = made(arguments.peer, arguments.folder, config, progress)
    return Findings([(f"{arguments.peer} in {arguments.folder}", rows)], config.model_dump())


def _add_acceptance(acceptance: argparse.ArgumentParser) -> None:
    config_arguments(acceptance)
    acceptance.add_argument("--rules", type=names, default=(), help="rules by name; default: all but synthetic")
    acceptance.add_argument(
        "--temperature", dest="temperatures", metavar="TEMPERATURE", type=floats, default=(0.0, 0.7, 1.0),
        help="temperatures; default: 0,0.7,1",
    )  # fmt: skip
    acceptance.add_argument("--depth", type=int, default=4, help="drafted tokens per round; default: 4")
    acceptance.add_argument("--prompts", type=int, default=8, help="how many of the shipped prompts; default: 8")
    acceptance.add_argument("--max-tokens", type=int, default=48, help="tokens per answer, exactly; default: 48")
    json_argument(acceptance, "versions, config and rows")
    finds(acceptance, _acceptance)


def _acceptance(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.acceptance import Options, measure

    config, options = runnable_config(arguments), options_of(Options, arguments)
    rows = measure(config, options, progress)
    title = f"{config.served_name}: depth {options.depth}, {options.prompts} prompts × {options.max_tokens} tokens"
    return Findings([(title, rows)], settings_of(options, config))


def _add_ties(ties: argparse.ArgumentParser) -> None:
    config_arguments(ties)
    ties.add_argument("--positions", type=int, default=400, help="positions to compare; default: 400")
    json_argument(ties, "versions, config and rows")
    finds(ties, _ties)


def _ties(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.ties import measure

    config = runnable_config(arguments)
    rows = measure(config, arguments.positions, progress)
    title = f"{config.served_name}: choices that differ from those of one position at a time"
    return Findings([(title, rows)], config.model_dump() | {"bench": {"positions": arguments.positions}})


def _add_speculators(speculators: argparse.ArgumentParser) -> None:
    from specserve.bench.held_out import PROMPTS

    config_arguments(speculators)
    known = ("small_model", "ngram", "suffix")
    speculators.add_argument("--speculators", type=names, default=known, help=f"default: {','.join(known)}")
    speculators.add_argument("--kinds", type=names, default=tuple(PROMPTS), help=f"default: {','.join(PROMPTS)}")
    speculators.add_argument(
        "--temperature", dest="temperatures", metavar="TEMPERATURE", type=floats, default=(0.0, 1.0),
        help="temperatures; default: 0,1",
    )  # fmt: skip
    speculators.add_argument("--depth", type=int, default=4, help="drafted tokens per round; default: 4")
    speculators.add_argument("--prompts", type=int, default=12, help="prompts of each kind, at most; default: 12")
    speculators.add_argument("--max-tokens", type=int, default=96, help="tokens per answer, at most; default: 96")
    json_argument(speculators, "versions, config and rows")
    finds(speculators, _speculators)


def _speculators(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.speculators import Options, measure

    config, options = runnable_config(arguments), options_of(Options, arguments)
    rows = measure(config, options, progress)
    title = f"{config.served_name}: depth {options.depth}, at most {options.max_tokens} tokens per answer"
    return Findings([(title, rows)], settings_of(options, config))


def _add_prefix(prefix: argparse.ArgumentParser) -> None:
    config_arguments(prefix)
    prefix.add_argument("--prefix", type=int, default=1000, help="tokens that prompts share; default: 1000")
    prefix.add_argument("--repeats", type=int, default=5, help="beginnings that are read cold and warm; default: 5")
    prefix.add_argument("--budgets", type=numbers, default=(32, 128, 512), help="prefill budgets; default: 32,128,512")
    json_argument(prefix, "versions, config and rows")
    finds(prefix, _prefix)


def _prefix(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.prefix import Options, measure

    config, options = runnable_config(arguments), options_of(Options, arguments)
    rows = measure(config, options, progress)
    title = f"{config.served_name}: prompts that begin alike, and a prompt beside a running answer"
    return Findings([(title, rows)], settings_of(options, config))


def _add_metrics(metrics: argparse.ArgumentParser) -> None:
    config_arguments(metrics)
    metrics.add_argument("--passes", type=int, default=15, help="interleaved passes of each system; default: 15")
    metrics.add_argument("--prompts", type=int, default=8, help="requests at once; default: 8")
    metrics.add_argument("--max-tokens", type=int, default=32, help="tokens per answer, exactly; default: 32")
    metrics.add_argument("--batch", type=numbers, default=(1, 16, 64), help="coordinator's requests; default: 1,16,64")
    metrics.add_argument("--rounds", type=int, default=400, help="coordinator's rounds of each system; default: 400")
    json_argument(metrics, "versions, config and rows")
    finds(metrics, _metrics)


def _metrics(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.metrics import Options, measure

    config, options = runnable_config(arguments), options_of(Options, arguments)
    throughput, coordinator = measure(config, options, progress)
    return Findings(
        [
            ("whole engines, tokens per second", throughput),
            ("the coordinator's own processor time for a round, drafting ahead", coordinator),
        ],
        settings_of(options, config),
    )


def _add_curves(curves: argparse.ArgumentParser) -> None:
    config_arguments(curves)
    curves.add_argument(
        "--context", dest="contexts", type=numbers, default=(128, 512, 1024, 2048, 4096),
        help="positions of one request before the step; default: 128,512,1024,2048,4096",
    )  # fmt: skip
    curves.add_argument(
        "--requests", type=numbers, default=(1, 2, 4, 8, 16, 32, 64),
        help="requests at the shortest context; default: 1,2,4,8,16,32,64",
    )  # fmt: skip
    curves.add_argument("--positions", type=numbers, default=(1, 5), help="tokens per request; default: 1,5")
    curves.add_argument("--repeats", type=int, default=5, help="turns, of which the fastest counts; default: 5")
    json_argument(curves, "versions, config and rows")
    finds(curves, _curves)


def _curves(arguments: argparse.Namespace) -> Findings:
    from specserve.bench.curves import Options, measure

    config, options = runnable_config(arguments), options_of(Options, arguments)
    rows = measure(config, options, progress)
    return Findings(
        [(f"{config.served_name}: one step, fastest of {options.repeats}", rows)], settings_of(options, config)
    )
