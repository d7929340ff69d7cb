"""What several verbs take: arguments that make a configuration, and the types of values that are lists."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specserve import config as configs
from specserve import speculative_config
from specserve.config import Config
from specserve.errors import ConfigError

if TYPE_CHECKING:
    # argparse has no public name for what `add_subparsers` returns.
    Places = argparse._SubParsersAction[argparse.ArgumentParser]

Verb = Callable[[argparse.Namespace], int]
"""Does what a command says, and returns its exit status."""

_FLAGS = {
    "target": "target.source",
    "draft": "draft.model.source",
    "speculator": "draft.speculator",
    "depth": "engine.depth",
    "host": "server.host",
    "port": "server.port",
    "ssl_certfile": "server.ssl_certfile",
    "ssl_keyfile": "server.ssl_keyfile",
}


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """What `read_config` reads."""
    parser.add_argument("--config", type=Path, help="YAML file with the configuration")
    parser.add_argument(
        "--profile", help="no models: emulate the devices of this profile, one of models/profiles/ or a .json file"
    )
    parser.add_argument("--target", help="the target model: demo, emulated, a folder, or a .gguf file (target.source)")
    parser.add_argument("--draft", help="the draft model (draft.model.source)")
    parser.add_argument(
        "--speculator",
        help="small_model, eagle, mtp, ngram, suffix, prediction, none, or a dotted path (draft.speculator)",
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
        name, value = _setting(item)
        overrides[name] = value
    if arguments.config is not None:
        return configs.load(arguments.config, overrides)
    return configs.parse(configs.override({}, overrides), where="command line")


def _setting(item: str) -> tuple[str, Any]:
    """Name and value of one --set."""
    name, equals, value = item.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set takes NAME=VALUE, found {item!r}")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {item!r}: the value is not valid YAML") from None


def runnable_config(arguments: argparse.Namespace) -> Config:
    """The configuration, refused before anything is loaded where its speculator cannot be. Raises ConfigError."""
    from specserve import drafting

    config = read_config(arguments)
    drafting.has_worker(config.draft)  # raises for what is no speculator
    without_bars()
    return config


def without_bars() -> None:
    """By transformers' own switch; worker processes inherit it. Bars would be drawn over our lines."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes numbers such as 0,4; found {text!r}") from None


def floats(text: str) -> tuple[float, ...]:
    """Numbers with commas between."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes numbers such as 0,0.7; found {text!r}") from None


def names(text: str) -> tuple[str, ...]:
    """Names with commas between."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def servers_or_folder(text: str) -> tuple[tuple[str, str], ...] | Path:
    """NAME=URL pairs with commas between, or a folder that is there."""
    if Path(text).is_dir():
        return Path(text)
    pairs = [tuple(part.partition("=")[::2]) for part in names(text)]
    if not all(name and url.startswith(("http://", "https://")) for name, url in pairs):
        raise argparse.ArgumentTypeError(
            f"takes servers such as vllm=http://127.0.0.1:8081, or a folder; found {text!r}"
        )
    return tuple((name, url) for name, url in pairs)
