"""The command line: serve, chat, check, distill, bench. Each verb imports its room only when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from specserve import __version__, speculative_config
from specserve import config as configs
from specserve.config import Config
from specserve.distill import command
from specserve.errors import ConfigError, SpecserveError

_ABOUT = "Serve large language models with speculation: a draft model guesses tokens, the target checks them."

_EPILOG = "Start with `specserve serve`, then `specserve chat` in another terminal. `specserve VERB --help` tells more."

Verb = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 for a failure in words, 2 for wrong usage, 130 for Ctrl-C."""
    arguments = _parser().parse_args(argv)
    verb: Verb = arguments.verb
    try:
        return verb(arguments)
    except SpecserveError as error:
        print(f"specserve: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specserve", description=_ABOUT, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"specserve {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    serve = verbs.add_parser("serve", help="start a pipeline on Ray with an OpenAI-compatible HTTP endpoint in front")
    _config_arguments(serve)
    serve.add_argument("--host", help="address to listen on (server.host)")
    serve.add_argument("--port", type=int, help="port to listen on (server.port); 0 picks a free one")
    serve.add_argument("--ray-address", help="use this Ray cluster instead of a local one, e.g. auto")
    serve.set_defaults(verb=_serve)

    chat = verbs.add_parser("chat", help="chat with a running server in the terminal")
    chat.add_argument(
        "--url", default="http://127.0.0.1:8000", help="where the server is; default: http://127.0.0.1:8000"
    )
    chat.add_argument("--api-key", help="key of the server; default: the environment's SPECSERVE_API_KEY")
    chat.add_argument("--model", help="model name; default: the first one served")
    chat.add_argument("--system", help="system prompt")
    chat.add_argument("--temperature", type=float, help="0 is greedy; default: the server's")
    chat.add_argument("--max-tokens", type=int, default=512, help="longest answer; default: 512")
    chat.add_argument("--depth", type=int, help="drafted tokens per round; 0 switches speculation off")
    chat.set_defaults(verb=_chat)

    check = verbs.add_parser("check", help="say what will run where, and what cannot")
    _config_arguments(check)
    check.set_defaults(verb=_check)

    top = verbs.add_parser("top", help="watch a running server in the terminal: workers, slots, acceptance, pace")
    top.add_argument(
        "--url", default="http://127.0.0.1:8000", help="where the server is; default: http://127.0.0.1:8000"
    )
    top.add_argument("--once", action="store_true", help="print one picture and end")
    top.set_defaults(verb=_top)

    boards = verbs.add_parser("dashboards", help="write the Grafana boards, alert rules and Prometheus files anew")
    boards.add_argument("--out", type=Path, default=Path(), help="folder to write below; default: the current one")
    boards.set_defaults(verb=_dashboards)

    distill = verbs.add_parser("distill", help=command.ABOUT)
    command.add_arguments(distill)
    distill.set_defaults(verb=command.run)

    bench = verbs.add_parser("bench", help="measure speed and acceptance, systems side by side").add_subparsers(
        required=True, metavar="BENCH"
    )
    _add_benches(bench)
    return parser


def _add_benches(bench: Any) -> None:
    _compare_arguments(
        bench.add_parser("compare", help="depth 0 against depth k, in process, through Ray, and transformers")
    )
    _acceptance_arguments(
        bench.add_parser("acceptance", help="drafted tokens that each rule keeps on a pair of models")
    )
    ties = bench.add_parser("ties", help="how often the shape of a batch alone flips a choice of the target")
    _config_arguments(ties)
    ties.add_argument("--positions", type=int, default=400, help="positions to compare; default: 400")
    ties.add_argument("--json", type=Path, help="also write machine, versions, config and rows to this file")
    ties.set_defaults(verb=_ties)
    _speculators_arguments(bench.add_parser("speculators", help="drafted tokens that each speculator keeps, by kind"))
    _pipeline_arguments(bench.add_parser("pipeline", help="what drafting ahead is worth, on emulated devices and Ray"))
    _load_arguments(bench.add_parser("load", help="what clients see under load, and what the HTTP side costs"))
    _chaos_arguments(bench.add_parser("chaos", help="kill, stop, slow and cut off processes under open streams"))
    _scale_arguments(bench.add_parser("scale", help="throughput by number of pipelines, and ways of routing to them"))
    _soak_arguments(bench.add_parser("soak", help="memory, files and shared memory over minutes of mixed load"))
    _rules_arguments(bench.add_parser("rules", help="cost of each verification rule against reading the logits once"))
    _exactness_arguments(bench.add_parser("exactness", help="what rules put out against the target's law, with plots"))
    _gpu_arguments(bench.add_parser("gpu", help="one device, no Ray: checks, times of steps, and the whole pipeline"))
    _prefix_arguments(
        bench.add_parser("prefix", help="first tokens warm against cold, and what prompts cost the others")
    )
    _coordinator_arguments(bench.add_parser("coordinator", help="cost of a round to the coordinator, without models"))
    _metrics_arguments(bench.add_parser("metrics", help="throughput with metrics on against off, and with traces"))
    _curves_arguments(bench.add_parser("curves", help="cost of a target's step by context and requests, on a CPU"))


def _curves_arguments(curves: argparse.ArgumentParser) -> None:
    _config_arguments(curves)
    curves.add_argument(
        "--context", dest="contexts", type=_numbers, default=(128, 512, 1024, 2048, 4096),
        help="positions of one request before the step; default: 128,512,1024,2048,4096",
    )  # fmt: skip
    curves.add_argument(
        "--requests", type=_numbers, default=(1, 2, 4, 8, 16, 32, 64),
        help="requests at the shortest context; default: 1,2,4,8,16,32,64",
    )  # fmt: skip
    curves.add_argument("--positions", type=_numbers, default=(1, 5), help="tokens per request; default: 1,5")
    curves.add_argument("--repeats", type=int, default=5, help="turns, of which the fastest counts; default: 5")
    curves.add_argument("--json", type=Path, help="also write machine, versions, config and rows to this file")
    curves.set_defaults(verb=_curves)


def _compare_arguments(compare: argparse.ArgumentParser) -> None:
    _config_arguments(compare)
    compare.add_argument("--concurrency", type=_numbers, default=(1, 8), help="requests at a time; default: 1,8")
    compare.add_argument("--depth", dest="depths", type=_numbers, default=(0, 4), help="depths; default: 0,4")
    systems = ("transformers", "local", "ray")
    compare.add_argument(
        "--systems", type=_names, default=systems, help=f"any of {','.join(systems)}, which is the default"
    )
    compare.add_argument(
        "--speculators",
        type=_names,
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
        type=_named_urls,
        default=(),
        help="servers of other engines that run already, as NAME=URL,…; asked by OpenAI's completions API",
    )
    compare.add_argument("--json", type=Path, help="also write machine, versions, config and rows to this file")
    compare.set_defaults(verb=_compare)


def _metrics_arguments(metrics: argparse.ArgumentParser) -> None:
    _config_arguments(metrics)
    metrics.add_argument("--passes", type=int, default=15, help="interleaved passes of each system; default: 15")
    metrics.add_argument("--prompts", type=int, default=8, help="requests at once; default: 8")
    metrics.add_argument("--max-tokens", type=int, default=32, help="tokens per answer, exactly; default: 32")
    metrics.add_argument("--batch", type=_numbers, default=(1, 16, 64), help="coordinator's requests; default: 1,16,64")
    metrics.add_argument("--rounds", type=int, default=400, help="coordinator's rounds of each system; default: 400")
    metrics.add_argument("--json", type=Path, help="also write machine, versions, config and rows to this file")
    metrics.set_defaults(verb=_metrics)


def _acceptance_arguments(acceptance: argparse.ArgumentParser) -> None:
    _config_arguments(acceptance)
    acceptance.add_argument("--rules", type=_names, default=(), help="rules by name; default: all but synthetic")
    acceptance.add_argument(
        "--temperature", type=_floats, default=(0.0, 0.7, 1.0), help="temperatures; default: 0,0.7,1"
    )
    acceptance.add_argument("--depth", type=int, default=4, help="drafted tokens per round; default: 4")
    acceptance.add_argument("--prompts", type=int, default=8, help="how many of the shipped prompts; default: 8")
    acceptance.add_argument("--max-tokens", type=int, default=48, help="tokens per answer, exactly; default: 48")
    acceptance.add_argument("--json", type=Path, help="also write machine, versions, config and rows to this file")
    acceptance.set_defaults(verb=_acceptance)


def _pipeline_arguments(pipeline: argparse.ArgumentParser) -> None:
    modes = ("plain", "serial", "ahead1", "ahead")
    pipeline.add_argument("--transport", choices=("socket", "ray"), default="socket", help="default: socket")
    pipeline.add_argument("--profile", default="qwen3-32b-0.6b-h100", help="device profile: a name or a .json file")
    pipeline.add_argument("--modes", type=_names, default=modes, help=f"default: {','.join(modes)}; also: adaptive")
    pipeline.add_argument("--batch", type=_numbers, default=(1, 8, 32, 64), help="requests; default: 1,8,32,64")
    pipeline.add_argument("--temperature", type=_floats, default=(0.0, 0.7, 1.0), help="default: 0,0.7,1")
    pipeline.add_argument("--rule", default="coupled", help="verification rule; default: coupled")
    pipeline.add_argument("--depth", type=_numbers, default=(4,), help="drafted tokens per round; default: 4")
    pipeline.add_argument("--acceptance", type=float, default=0.78, help="of the emulated draft; default: 0.78")
    pipeline.add_argument(
        "--runner-up-hit", type=float, default=0.9, help="its runners-up, where its first is wrong; default: 0.9"
    )
    pipeline.add_argument("--window", type=float, default=4.0, help="seconds that each case is measured; default: 4")
    pipeline.add_argument("--json", type=Path, help="also write machine, versions and rows to this file")
    pipeline.add_argument("--plot", type=Path, help="also draw tokens/s and limits into this file, e.g. a .png or .svg")
    pipeline.set_defaults(verb=_pipeline)


def _load_arguments(load: argparse.ArgumentParser) -> None:
    load.add_argument("--url", help="a running server; default: one of emulated devices on a Ray of its own")
    load.add_argument("--profile", default="qwen3-32b-0.6b-h100", help="device profile: a name or a .json file")
    load.add_argument("--clients", type=_numbers, default=(1, 8, 64), help="closed loop, clients; default: 1,8,64")
    load.add_argument("--rates", type=_floats, default=(4.0,), help="open loop, requests a second; default: 4")
    load.add_argument("--seconds", type=float, default=10.0, help="how long each load comes; default: 10")
    load.add_argument("--max-tokens", type=int, default=128, help="longest answer; default: 128")
    load.add_argument("--json", type=Path, help="also write machine, versions, options and rows to this file")
    load.add_argument("--plot", type=Path, help="draw the rows to this file (.png, .svg, .pdf)")
    load.set_defaults(verb=_load)


def _chaos_arguments(chaos: argparse.ArgumentParser) -> None:
    kinds, roles = ("kill", "stop", "slow", "cut", "starve"), ("draft", "target", "coordinator", "ingress")
    chaos.add_argument("--profile", default="qwen3-32b-0.6b-h100", help="a profile of emulated devices, or demo")
    chaos.add_argument("--clients", type=int, default=32, help="streams at once; default: 32")
    chaos.add_argument("--seconds", type=float, default=120.0, help="how long faults come; default: 120")
    chaos.add_argument("--seed", type=int, default=0, help="of the faults and their times; default: 0")
    chaos.add_argument("--kinds", type=_names, default=kinds, help=f"any of {','.join(kinds)}, the default")
    chaos.add_argument("--roles", type=_names, default=roles, help=f"any of {','.join(roles)}, the default")
    chaos.add_argument("--max-tokens", type=int, default=400, help="tokens per answer, exactly; default: 400")
    chaos.add_argument("--hold", type=float, default=4.0, help="seconds that slow and cut last; default: 4")
    chaos.add_argument("--pause", type=float, default=3.0, help="longest pause between two faults; default: 3")
    chaos.add_argument("--json", type=Path, help="also write machine, versions, options and rows to this file")
    chaos.set_defaults(verb=_chaos)


def _soak_arguments(soak: argparse.ArgumentParser) -> None:
    soak.add_argument("--profile", default="qwen3-32b-0.6b-h100", help="a profile of emulated devices, or demo")
    soak.add_argument("--clients", type=int, default=16, help="streams at once; default: 16")
    soak.add_argument("--minutes", type=float, default=30.0, help="how long; default: 30")
    soak.add_argument("--warm-up", type=float, default=60.0, help="seconds before the first look; default: 60")
    soak.add_argument("--max-tokens", type=int, default=200, help="tokens per answer, exactly; default: 200")
    soak.add_argument("--growth", type=float, default=0.02, help="share that a process may grow; default: 0.02")
    soak.add_argument("--json", type=Path, help="also write machine, versions, options and rows to this file")
    soak.set_defaults(verb=_soak)


def _speculators_arguments(speculators: argparse.ArgumentParser) -> None:
    from specserve.bench.held_out import PROMPTS

    _config_arguments(speculators)
    known = ("small_model", "ngram", "suffix")
    speculators.add_argument("--speculators", type=_names, default=known, help=f"default: {','.join(known)}")
    speculators.add_argument("--kinds", type=_names, default=tuple(PROMPTS), help=f"default: {','.join(PROMPTS)}")
    speculators.add_argument("--temperature", type=_floats, default=(0.0, 1.0), help="temperatures; default: 0,1")
    speculators.add_argument("--depth", type=int, default=4, help="drafted tokens per round; default: 4")
    speculators.add_argument("--prompts", type=int, default=12, help="prompts of each kind, at most; default: 12")
    speculators.add_argument("--max-tokens", type=int, default=96, help="tokens per answer, at most; default: 96")
    speculators.add_argument("--json", type=Path, help="also write machine, versions, config and rows to this file")
    speculators.set_defaults(verb=_speculators)


def _scale_arguments(scale: argparse.ArgumentParser) -> None:
    scale.add_argument("--profile", default="qwen3-32b-0.6b-h100", help="devices; default: qwen3-32b-0.6b-h100")
    scale.add_argument("--pipelines", type=_numbers, default=(1, 2, 4), help="numbers of pipelines; default: 1,2,4")
    scale.add_argument("--clients", type=int, default=16, help="clients for each pipeline; default: 16")
    scale.add_argument("--seconds", type=float, default=10.0, help="length of each case; default: 10")
    scale.add_argument("--max-tokens", type=int, default=128, help="longest answer; default: 128")
    routing = ("prefix", "least_loaded", "round_robin")
    scale.add_argument("--routing", type=_names, default=routing, help=f"ways of routing; default: {','.join(routing)}")
    scale.add_argument("--routing-pipelines", type=int, default=2, help="pipelines to route to; default: 2")
    scale.add_argument("--prefixes", type=int, default=8, help="shared beginnings of prompts; default: 8")
    scale.add_argument("--prefix-tokens", type=int, default=1024, help="their length; default: 1024")
    scale.add_argument("--json", type=Path, help="also write machine, versions, options and rows to this file")
    scale.set_defaults(verb=_scale)


def _rules_arguments(rules: argparse.ArgumentParser) -> None:
    rules.add_argument("--batch", type=_numbers, default=(1, 8, 64), help="rows; default: 1,8,64")
    rules.add_argument("--depth", type=_numbers, default=(1, 4, 8), help="drafted tokens per row; default: 1,4,8")
    rules.add_argument(
        "--vocab", type=_numbers, default=(32_000, 152_000), help="vocabulary sizes; default: 32000,152000"
    )
    rules.add_argument("--repeats", type=int, default=5, help="timed passes; medians are reported; default: 5")
    rules.add_argument("--json", type=Path, help="also write machine, versions and rows to this file")
    rules.set_defaults(verb=_rules)


def _exactness_arguments(exactness: argparse.ArgumentParser) -> None:
    exactness.add_argument("--tokens", type=int, default=200_000, help="tokens of each rule; default: 200000")
    exactness.add_argument("--plots", type=Path, help="also write pictures to this folder")
    exactness.add_argument("--acceptance", type=Path, help="with --plots: JSON of bench acceptance, drawn as well")
    exactness.set_defaults(verb=_exactness)


def _coordinator_arguments(coordinator: argparse.ArgumentParser) -> None:
    modes = ("plain", "serial", "ahead1", "ahead12")
    coordinator.add_argument(
        "--modes", type=_names, default=modes, help=f"any of {','.join(modes)}, which is the default"
    )
    coordinator.add_argument("--temperature", type=_floats, default=(0.0, 1.0), help="temperatures; default: 0,1")
    coordinator.add_argument(
        "--batch", type=_numbers, default=(1, 16, 64, 256), help="running requests; default: 1,16,64,256"
    )
    coordinator.add_argument("--context", type=int, default=500, help="tokens of each prompt; default: 500")
    coordinator.add_argument("--rounds", type=int, default=100, help="timed rounds of each; default: 100")
    coordinator.add_argument("--json", type=Path, help="also write machine, versions and rows to this file")
    coordinator.set_defaults(verb=_coordinator)


def _gpu_arguments(gpu: argparse.ArgumentParser) -> None:
    gpu.add_argument("--shape", default="8b", help="8b (random weights of 8B and 1B parameters) or tiny; default: 8b")
    gpu.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:0, …; default: auto")
    gpu.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="of the weights")
    gpu.add_argument("--rows", type=_numbers, default=(1, 8, 32), help="requests at once; default: 1,8,32")
    gpu.add_argument("--depth", dest="depths", type=_numbers, default=(1, 4), help="drafted tokens; default: 1,4")
    gpu.add_argument("--context", type=int, default=512, help="cached tokens of each timed row; default: 512")
    gpu.add_argument("--repeats", type=int, default=10, help="timed runs of each step; default: 10")
    gpu.add_argument("--max-tokens", type=int, default=48, help="tokens per answer; default: 48")
    gpu.add_argument("--json", type=Path, help="also write machine, versions, options and rows to this file")
    gpu.set_defaults(verb=_gpu)


def _prefix_arguments(prefix: argparse.ArgumentParser) -> None:
    _config_arguments(prefix)
    prefix.add_argument("--prefix", type=int, default=1000, help="tokens that prompts share; default: 1000")
    prefix.add_argument("--repeats", type=int, default=5, help="beginnings that are read cold and warm; default: 5")
    prefix.add_argument("--budgets", type=_numbers, default=(32, 128, 512), help="prefill budgets; default: 32,128,512")
    prefix.add_argument("--json", type=Path, help="also write machine, versions, config and rows to this file")
    prefix.set_defaults(verb=_prefix)


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="YAML file with the configuration")
    parser.add_argument(
        "--profile", help="no models: emulate the devices of this profile, one of models/profiles/ or a .json file"
    )
    parser.add_argument("--target", help="the target model: demo, emulated, a folder, or a .gguf file (target.source)")
    parser.add_argument("--draft", help="the draft model (draft.model.source)")
    parser.add_argument(
        "--speculator", help="small_model, eagle, ngram, suffix, none, or a dotted path (draft.speculator)"
    )
    parser.add_argument("--speculative-config", metavar="JSON", help="drafting as vLLM's flag of this name has it")
    if parser.prog.endswith(("serve", "check")):
        parser.add_argument("--depth", type=int, help="drafted tokens per request and round (engine.depth)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any setting by its dotted name, e.g. --set engine.max_requests=16",
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes numbers such as 0,4; found {text!r}") from None


def _floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes numbers such as 0,0.7; found {text!r}") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _named_urls(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [tuple(part.partition("=")[::2]) for part in _names(text)]
    if not all(name and url.startswith(("http://", "https://")) for name, url in pairs):
        raise argparse.ArgumentTypeError(f"takes servers such as vllm=http://127.0.0.1:8081; found {text!r}")
    return tuple((name, url) for name, url in pairs)


_FLAGS = {
    "target": "target.source",
    "draft": "draft.model.source",
    "speculator": "draft.speculator",
    "depth": "engine.depth",
    "host": "server.host",
    "port": "server.port",
}


def read_config(arguments: argparse.Namespace) -> Config:
    """The configuration of a command: file, profile, flags, --set, the later ones winning. Raises ConfigError."""
    overrides: dict[str, Any] = {}
    if arguments.profile is not None:
        from specserve.models._device_profile import settings

        overrides |= settings(arguments.profile)
    if arguments.speculative_config is not None:
        overrides |= speculative_config.settings(arguments.speculative_config)
    for flag, dotted in _FLAGS.items():
        value = getattr(arguments, flag, None)
        if value is not None:
            overrides[dotted] = value
    for item in arguments.set:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set takes NAME=VALUE, found {item!r}")
        try:
            overrides[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {item!r}: the value is not valid YAML") from None
    if arguments.config is not None:
        return configs.load(arguments.config, overrides)
    return configs.parse(configs.override({}, overrides), where="command line")


def _runnable(arguments: argparse.Namespace) -> Config:
    """The configuration, refused before anything is loaded where its speculator or the --json file cannot be."""
    from specserve import drafting
    from specserve.bench.report import check_json_path

    config = read_config(arguments)
    drafting.has_worker(config.draft)  # raises for what is no speculator
    if getattr(arguments, "json", None) is not None:
        check_json_path(arguments.json)
    # transformers' own switch; worker processes inherit it. Bars would be drawn over our lines.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return config


def _serve(arguments: argparse.Namespace) -> int:
    from specserve import logs
    from specserve.cluster.launch import serve_until_stopped

    config = configs.keyed(_runnable(arguments), os.environ)
    logs.configure(config.log_format)
    serve_until_stopped(config, ray_address=arguments.ray_address)
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from specserve.chat import Chat

    chat = Chat(
        arguments.url,
        api_key=arguments.api_key or os.environ.get("SPECSERVE_API_KEY"),
        model=arguments.model,
        system=arguments.system,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        depth=arguments.depth,
    )
    chat.run()
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from specserve.check import report

    findings = report(read_config(arguments))
    for finding in findings:
        print(finding)
    return 1 if any(finding.problem for finding in findings) else 0


def _top(arguments: argparse.Namespace) -> int:
    from specserve.top import Top

    Top(arguments.url).run(once=arguments.once)
    return 0


def _dashboards(arguments: argparse.Namespace) -> int:
    from specserve.dashboards.files import write

    changed = write(arguments.out)
    for path in changed:
        print(path)
    print(f"{len(changed)} file{'' if len(changed) == 1 else 's'} changed")
    return 0


def _progress(text: str) -> None:
    """Tell a person who waits what a bench is at."""
    print(f"· {text}", file=sys.stderr, flush=True)


def _compare(arguments: argparse.Namespace) -> int:
    from specserve.bench.compare import Options, compare
    from specserve.bench.report import show, write_json

    config = _runnable(arguments)
    options = Options(
        depths=arguments.depths,
        concurrency=arguments.concurrency,
        systems=arguments.systems,
        speculators=arguments.speculators,
        prompts=arguments.prompts,
        max_tokens=arguments.max_tokens,
        passes=arguments.passes,
        peers=arguments.peers,
    )
    rows = compare(config, options, _progress)
    show(f"{config.served_name}: greedy, {options.prompts} prompts × {options.max_tokens} tokens", rows)
    if arguments.json is not None:
        settings = config.model_dump() | {"bench": {name: getattr(options, name) for name in options.__slots__}}
        write_json(arguments.json, settings, rows)
    return 0


def _acceptance(arguments: argparse.Namespace) -> int:
    from specserve.bench.acceptance import Options, measure
    from specserve.bench.report import show, write_json

    config = _runnable(arguments)
    options = Options(arguments.rules, arguments.temperature, arguments.depth, arguments.prompts, arguments.max_tokens)
    rows = measure(config, options, _progress)
    show(f"{config.served_name}: depth {options.depth}, {options.prompts} prompts × {options.max_tokens} tokens", rows)
    if arguments.json is not None:
        settings = config.model_dump() | {"bench": {name: getattr(options, name) for name in options.__slots__}}
        write_json(arguments.json, settings, rows)
    return 0


def _speculators(arguments: argparse.Namespace) -> int:
    from specserve.bench.report import show, write_json
    from specserve.bench.speculators import Options, measure

    config = _runnable(arguments)
    names = ("speculators", "kinds", "temperature", "depth", "prompts", "max_tokens")
    options = Options(*(getattr(arguments, name) for name in names))
    rows = measure(config, options, _progress)
    show(f"{config.served_name}: depth {options.depth}, at most {options.max_tokens} tokens per answer", rows)
    if arguments.json is not None:
        settings = config.model_dump() | {"bench": {name: getattr(options, name) for name in options.__slots__}}
        write_json(arguments.json, settings, rows)
    return 0


def _curves(arguments: argparse.Namespace) -> int:
    from specserve.bench.curves import Options, measure
    from specserve.bench.report import show, write_json

    config = _runnable(arguments)
    options = Options(arguments.contexts, arguments.requests, arguments.positions, arguments.repeats)
    rows = measure(config, options, _progress)
    show(f"{config.served_name}: one step, fastest of {options.repeats}", rows)
    if arguments.json is not None:
        settings = config.model_dump() | {"bench": {name: getattr(options, name) for name in options.__slots__}}
        write_json(arguments.json, settings, rows)
    return 0


def _ties(arguments: argparse.Namespace) -> int:
    from specserve.bench.report import show, write_json
    from specserve.bench.ties import measure

    config = _runnable(arguments)
    rows = measure(config, arguments.positions, _progress)
    show(f"{config.served_name}: choices that differ from those of one position at a time", rows)
    if arguments.json is not None:
        write_json(arguments.json, config.model_dump() | {"bench": {"positions": arguments.positions}}, rows)
    return 0


def _pipeline(arguments: argparse.Namespace) -> int:
    from specserve.bench.pipeline import Options, measure, plot, table
    from specserve.bench.report import check_json_path, show, write_json

    if arguments.json is not None:
        check_json_path(arguments.json)
    options = Options(
        profile=arguments.profile,
        modes=arguments.modes,
        batches=arguments.batch,
        temperatures=arguments.temperature,
        rule=arguments.rule,
        depths=arguments.depth,
        acceptance=arguments.acceptance,
        runner_up_hit=arguments.runner_up_hit,
        transport=arguments.transport,
        window_s=arguments.window,
    )
    rows = measure(options, _progress)
    about = f"acceptance {options.acceptance:g}, runner-up hit {options.runner_up_hit:g}"
    show(f"{options.profile}, {options.rule}: {about}", table(rows))
    if arguments.json is not None:
        write_json(arguments.json, {name: getattr(options, name) for name in options.__slots__}, rows)
    if arguments.plot is not None:
        plot(rows, arguments.plot)
    return 0


def _load(arguments: argparse.Namespace) -> int:
    from specserve.bench.load import Options, measure, plot
    from specserve.bench.report import check_json_path, show, write_json

    for path in (arguments.json, arguments.plot):
        if path is not None:
            check_json_path(path)
    options = Options(
        url=arguments.url,
        profile=arguments.profile,
        clients=arguments.clients,
        rates=arguments.rates,
        seconds=arguments.seconds,
        max_tokens=arguments.max_tokens,
    )
    rows = measure(options, _progress)
    show(
        f"{options.url or options.profile}: times as clients see them; good: first token in 0.5 s, 50 ms a token", rows
    )
    if arguments.json is not None:
        write_json(arguments.json, {name: getattr(options, name) for name in options.__slots__}, rows)
    if arguments.plot is not None:
        plot(rows, arguments.plot)
    return 0


def _chaos(arguments: argparse.Namespace) -> int:
    from specserve.bench.chaos import Options, broken, measure, rows, summary
    from specserve.bench.report import check_json_path, show, write_json

    if arguments.json is not None:
        check_json_path(arguments.json)
    names = ("profile", "clients", "seconds", "seed", "kinds", "roles", "max_tokens")
    given = {name: getattr(arguments, name) for name in names}
    options = Options(**given, hold_s=arguments.hold, pause_s=arguments.pause)
    outcome = measure(options, _progress)
    show(f"{options.profile}, {options.clients} clients: faults by role and kind", rows(outcome))
    show("the whole run", [summary(outcome)])
    if arguments.json is not None:
        settings = {name: getattr(options, name) for name in options.__slots__}
        write_json(arguments.json, settings | {"whole": summary(outcome)}, rows(outcome))
    return _not_kept(broken(outcome))


def _soak(arguments: argparse.Namespace) -> int:
    from specserve.bench.report import check_json_path, show, write_json
    from specserve.bench.soak import Options, broken, measure, rows, summary

    if arguments.json is not None:
        check_json_path(arguments.json)
    options = Options(
        profile=arguments.profile,
        clients=arguments.clients,
        minutes=arguments.minutes,
        warm_up_s=arguments.warm_up,
        max_tokens=arguments.max_tokens,
        most_growth=arguments.growth,
    )
    outcome = measure(options, _progress)
    show(f"{options.profile}, {options.clients} clients, {options.minutes:g} minutes", rows(outcome))
    show("the whole run", [summary(outcome)])
    if arguments.json is not None:
        settings = {name: getattr(options, name) for name in options.__slots__}
        write_json(arguments.json, settings | {"whole": summary(outcome)}, rows(outcome))
    return _not_kept(broken(outcome, options.most_growth))


def _not_kept(promises: list[str]) -> int:
    """Tell the promises that were not kept; the exit status."""
    for promise in promises:
        print(f"specserve: not kept: {promise}", file=sys.stderr)
    return 1 if promises else 0


def _scale(arguments: argparse.Namespace) -> int:
    from specserve.bench.report import check_json_path, show, write_json
    from specserve.bench.scale import Options, measure

    if arguments.json is not None:
        check_json_path(arguments.json)
    options = Options(**{name: getattr(arguments, name) for name in Options.__slots__})
    results = measure(options, _progress)
    show(f"{options.profile}: tokens/s, and shares of a core per process", results.throughput)
    show(f"{options.prefixes} shared beginnings of {options.prefix_tokens} tokens", results.routing)
    show("what larger deployments need, by the constants of this run", results.model)
    if arguments.json is not None:
        rows = [*results.throughput, *results.routing, *results.model]
        write_json(arguments.json, {name: getattr(options, name) for name in options.__slots__}, rows)
    return 0


def _rules(arguments: argparse.Namespace) -> int:
    from specserve.bench.report import check_json_path, show, write_json
    from specserve.bench.rules import Options, measure

    if arguments.json is not None:
        check_json_path(arguments.json)
    options = Options(arguments.batch, arguments.depth, arguments.vocab, arguments.repeats)
    rows = measure(options, _progress)
    show("rules with sparse drafts; ratio is ms in units of reading the logits once", rows)
    if arguments.json is not None:
        write_json(arguments.json, {name: getattr(options, name) for name in options.__slots__}, rows)
    return 0


def _exactness(arguments: argparse.Namespace) -> int:
    from specserve.bench.exactness import measure, plot
    from specserve.bench.report import show

    rows = measure(arguments.tokens, _progress)
    show("what comes out, against the target's law; a rule that is exact has a p-value from 0 to 1 by chance", rows)
    for path in plot(rows, arguments.acceptance, arguments.plots) if arguments.plots is not None else ():
        print(f"wrote {path}")
    return 0


def _metrics(arguments: argparse.Namespace) -> int:
    from specserve.bench.metrics import Options, measure
    from specserve.bench.report import show, write_json

    config = _runnable(arguments)
    names = ("passes", "prompts", "max_tokens", "batch", "rounds")
    options = Options(**{name: getattr(arguments, name) for name in names})
    throughput, coordinator = measure(config, options, _progress)
    show("whole engines, tokens per second", throughput)
    show("the coordinator's own processor time for a round, drafting ahead", coordinator)
    if arguments.json is not None:
        settings = config.model_dump() | {"bench": {name: getattr(options, name) for name in names}}
        write_json(arguments.json, settings, [*throughput, *coordinator])
    return 0


def _coordinator(arguments: argparse.Namespace) -> int:
    from specserve.bench.coordinator import Options, measure
    from specserve.bench.report import check_json_path, show, write_json

    if arguments.json is not None:
        check_json_path(arguments.json)
    names = ("modes", "temperature", "batch", "context", "rounds")
    options = Options(**{name: getattr(arguments, name) for name in names})
    rows = measure(options, _progress)
    show("the coordinator's own processor time for a round", rows)
    if arguments.json is not None:
        write_json(arguments.json, {name: getattr(options, name) for name in names}, rows)
    return 0


def _gpu(arguments: argparse.Namespace) -> int:
    from specserve.bench.gpu import Options, measure
    from specserve.bench.report import check_json_path, show, write_json

    if arguments.json is not None:
        check_json_path(arguments.json)
    settings = {name: getattr(arguments, name) for name in Options.__slots__}
    report = measure(Options(**settings), _progress)
    show("what must hold", report.checks)
    show(f"steps of {arguments.shape} in {arguments.dtype} over {arguments.context} cached tokens", report.steps)
    show("the whole pipeline, made-up acceptance", report.pipeline)
    if arguments.json is not None:
        write_json(arguments.json, settings, [*report.checks, *report.steps, *report.pipeline])
    return 0 if all(row["holds"] == "yes" for row in report.checks) else 1


def _prefix(arguments: argparse.Namespace) -> int:
    from specserve.bench.prefix import Options, measure
    from specserve.bench.report import show, write_json

    config = _runnable(arguments)
    names = ("prefix", "repeats", "budgets")
    settings = {name: getattr(arguments, name) for name in names}
    rows = measure(config, Options(**settings), _progress)
    show(f"{config.served_name}: prompts that begin alike, and a prompt beside a running answer", rows)
    if arguments.json is not None:
        write_json(arguments.json, config.model_dump() | {"bench": settings}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
