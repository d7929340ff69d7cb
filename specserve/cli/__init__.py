"""The command line: serve, chat, check, distill, bench. Each verb imports its room only when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from specserve import __version__
from specserve.cli import bench, verbs
from specserve.cli.options import Verb
from specserve.distill import command
from specserve.errors import SpecserveError

_ABOUT = "Serve large language models with speculation: a draft model guesses tokens, the target checks them."

_EPILOG = "Start with `specserve serve`, then `specserve chat` in another terminal. `specserve VERB --help` tells more."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 for a failure in words, 2 for wrong usage, 130 for Ctrl-C."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.verb is None:
        parser.print_help(sys.stderr)
        return 2
    verb: Verb = arguments.verb
    try:
        return verb(arguments)
    except SpecserveError as error:
        print(f"specserve: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Refuses itself what it does not know. argparse leaves that to the outermost parser, which shows its own usage.

    A part of a flag's name is not that flag: it would be a typo that nobody hears of.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = {str(choice): str(choice) for choice in action.choices}
        known = ", ".join(choices)
        raise argparse.ArgumentError(
            action, f"invalid choice: {value!r}; there are: {known}{_like(str(value), choices)}"
        )

    def _meant(self, unknown: Sequence[str]) -> str:
        """The flag that the first unknown one is most like, as a question; nothing where there is none."""
        flags = {flag.lstrip("-"): flag for action in self._actions for flag in action.option_strings}
        return _like(unknown[0].partition("=")[0].lstrip("-"), flags)


def _like(unknown: str, known: Mapping[str, str]) -> str:
    """What of the known, by how it is spelt, this is most like, as a question; nothing where there is none."""
    like = get_close_matches(unknown, known, n=1, cutoff=0.75)
    return f"; did you mean {known[like[0]]}?" if like else ""


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(prog="specserve", description=_ABOUT, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"specserve {__version__}")
    parser.set_defaults(verb=None)
    places = parser.add_subparsers(metavar="VERB")
    verbs.add(places)
    distill = places.add_parser("distill", help=command.ABOUT)
    command.add_arguments(distill)
    distill.set_defaults(verb=command.run)
    bench.add(places)
    return parser
