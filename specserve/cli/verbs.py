"""serve, check, and what looks at a running server: chat, top, dashboards."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specserve import config as configs
from specserve.cli.options import config_arguments, read_config, runnable_config, without_bars

if TYPE_CHECKING:
    from specserve.cli.options import Places

_URL = "http://127.0.0.1:8000"


def add(places: Places) -> None:
    """Add each verb with its arguments."""
    serve = places.add_parser("serve", help="start a pipeline on Ray with an OpenAI-compatible HTTP endpoint in front")
    config_arguments(serve)
    _add_address(serve)
    serve.add_argument("--ray-address", help="use this Ray cluster instead of a local one, e.g. auto")
    serve.set_defaults(verb=_serve)

    _add_chat(places)

    check = places.add_parser("check", help="say what will run where, and what cannot")
    config_arguments(check)
    _add_address(check)
    check.set_defaults(verb=_check)

    top = places.add_parser("top", help="watch a running server in the terminal: workers, slots, acceptance, pace")
    top.add_argument("--url", default=_URL, help=f"where the server is; default: {_URL}")
    top.add_argument("--api-key", help="key of the server; default: the environment's SPECSERVE_API_KEY")
    top.add_argument("--once", action="store_true", help="print one picture and end")
    top.set_defaults(verb=_top)

    boards = places.add_parser("dashboards", help="write the Grafana boards, alert rules and Prometheus files anew")
    boards.add_argument("--out", type=Path, default=Path(), help="folder to write below; default: the current one")
    boards.set_defaults(verb=_dashboards)


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on (server.host)")
    parser.add_argument("--port", type=int, help="port to listen on (server.port); 0 picks a free one")
    parser.add_argument("--ssl-certfile", help="PEM certificate chain; speaks HTTPS only (server.ssl_certfile)")
    parser.add_argument("--ssl-keyfile", help="private key of the certificate (server.ssl_keyfile)")


def _add_chat(places: Places) -> None:
    chat = places.add_parser(
        "chat",
        help="chat with a running server in the terminal",
        epilog="Lines from a pipe are messages too. The exit status is 0 if each message was answered.",
    )
    chat.add_argument("--url", default=_URL, help=f"where the server is; default: {_URL}")
    chat.add_argument("--api-key", help="key of the server; default: the environment's SPECSERVE_API_KEY")
    chat.add_argument("--model", help="model name; default: the first one served")
    chat.add_argument("--system", help="system prompt")
    chat.add_argument("--temperature", type=float, help="0 is greedy; default: the server's")
    chat.add_argument("--max-tokens", type=int, default=512, help="longest answer; default: 512")
    chat.add_argument("--depth", type=int, help="drafted tokens per round; 0 switches speculation off")
    chat.set_defaults(verb=_chat)


def _serve(arguments: argparse.Namespace) -> int:
    config = configs.keyed(runnable_config(arguments), os.environ)
    print("loading Python packages", file=sys.stderr, flush=True)  # Ray and torch may take 20 s to import

    from specserve import logs
    from specserve.cluster.launch import serve_until_stopped

    logs.configure(config.log_format)
    serve_until_stopped(config, ray_address=arguments.ray_address)
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from specserve.chat import Chat

    chat = Chat(
        arguments.url,
        api_key=arguments.api_key or configs.client_key(os.environ),
        model=arguments.model,
        system=arguments.system,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        depth=arguments.depth,
    )
    return 1 if chat.run() else 0


def _check(arguments: argparse.Namespace) -> int:
    from specserve.check import report

    config = configs.keyed(read_config(arguments), os.environ)
    without_bars()
    problems = 0
    for finding in report(config, lambda line: print(line, file=sys.stderr, flush=True)):
        print(finding, flush=True)
        problems += finding.problem
    return 1 if problems else 0


def _top(arguments: argparse.Namespace) -> int:
    from specserve.top import Top

    api_key = arguments.api_key or configs.client_key(os.environ)
    Top(arguments.url, api_key=api_key).run(once=arguments.once)
    return 0


def _dashboards(arguments: argparse.Namespace) -> int:
    from specserve.dashboards.files import write

    changed = write(arguments.out)
    for path in changed:
        print(path)
    print(f"{len(changed)} file{'' if len(changed) == 1 else 's'} changed")
    return 0
