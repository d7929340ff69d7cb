"""The arguments of `specserve distill`, and what it prints. Imports torch only when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

ABOUT = "train a draft for a target, on text that the target writes; goes on where it stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defaults are those of the demo's own draft."""
    parser.add_argument("--target", default="demo", help="the target: demo, a folder, or a .gguf file; default: demo")
    parser.add_argument("--out", type=Path, required=True, help="folder for the draft, which `serve --draft` takes")
    parser.add_argument("--work", type=Path, help="folder for corpus and checkpoints; default: OUT.work")
    parser.add_argument("--data", type=Path, help="text or .jsonl file to learn from; default: the target writes")
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens in the corpus; default: 400000")
    parser.add_argument("--rows", type=int, default=256, help="texts that the target writes at once; default: 256")
    parser.add_argument(
        "--kind",
        default="small",
        help="small (a model), eagle or eagle3 (heads on the target's states); default: small",
    )
    parser.add_argument(
        "--layers", help="the target's: those that small starts from (default: 0,1), or that eagle3 reads the inputs of"
    )
    parser.add_argument("--ids", type=int, default=8192, help="size of the draft's vocabulary; default: 8192")
    parser.add_argument(
        "--start", type=Path, help="folder of a trained draft of this kind to begin at, with its vocabulary"
    )
    parser.add_argument("--steps", type=int, default=1500, help="optimiser steps in all; default: 1500")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens in each step; default: 2048")
    parser.add_argument("--unrolled", type=int, default=3, help="drafted places that a head is taught; default: 3")
    parser.add_argument("--learning-rate", type=float, help="the highest one; default: 0.0015, for heads 0.0004")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, …; default: auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; default: torch's choice")
    parser.add_argument("--seed", type=int, default=11, help="of texts and batches; default: 11")


def run(arguments: argparse.Namespace) -> int:
    """Distill as the arguments say. Raises ConfigError."""
    from specserve.distill.run import Options, distill
    from specserve.distill.training import Schedule
    from specserve.models.loading import apply_threads

    apply_threads(arguments.threads)
    schedule = Schedule(
        steps=arguments.steps,
        batch_tokens=arguments.batch_tokens,
        learning_rate=_rate(arguments.kind) if arguments.learning_rate is None else arguments.learning_rate,
        unrolled=arguments.unrolled,
        seed=arguments.seed,
    )
    options = Options(
        target=arguments.target,
        out=arguments.out,
        work=arguments.work or arguments.out.with_name(f"{arguments.out.name}.work"),
        data=arguments.data,
        tokens=arguments.tokens,
        rows=arguments.rows,
        kind=arguments.kind,
        layers=_layers(arguments.layers) if arguments.layers else (),
        ids=arguments.ids,
        start=arguments.start,
        device=arguments.device,
        seed=arguments.seed,
        schedule=schedule,
    )
    with _Shown() as shown:
        distill(options, shown)
    return 0


def _rate(kind: str) -> float:
    """A head begins with a matrix at its best, which the higher rate would destroy."""
    return 1.5e-3 if kind == "small" else 4e-4


def _layers(text: str) -> tuple[int, ...]:
    from specserve.errors import ConfigError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--layers takes numbers such as 0,1; found {text!r}") from None


class _Shown:
    """A `Progress` with one bar for each stage, where somebody looks, and lines in any case."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Bars(*columns, console=console, disable=not console.is_terminal)
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> _Shown:
        self._bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        """A line above the bars."""
        if self._bars.disable:
            print(f"· {line}", file=sys.stderr, flush=True)
        else:
            self._bars.console.print(line)

    def advance(self, stage: str, done: int, total: int) -> None:
        """Move the stage's bar."""
        if stage not in self._stages:
            self._stages[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._stages[stage], completed=done)
