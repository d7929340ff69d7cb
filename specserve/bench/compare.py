"""`specserve bench compare`: depth 0 against depth k, in process and through Ray, and against other engines.

All systems answer the same prompts greedily with the same number of tokens in one run; passes are interleaved, and the
median of the passes is reported, so that a disturbance of the machine hits every system alike.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from specserve import drafting, folders
from specserve.bench import peer_environments
from specserve.bench.peer_environments import Environment
from specserve.bench.peers import Peer
from specserve.bench.prompts import CHATS
from specserve.bench.report import Row
from specserve.bench.started_peers import Work, started
from specserve.bench.systems import Http, Local, Outcome, Prompts, System, TransformersGenerate
from specserve.config import Config
from specserve.errors import ConfigError, SpecserveError
from specserve.local import LocalEngine
from specserve.models.loading import prepare
from specserve.text import Tokenizer

Progress = Callable[[str], None]

SYSTEMS = ("transformers", "local", "ray")


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. depths are sorted by the order given; 0 is plain decoding.

    peers are (name, base URL) of servers that run, or the folder of environments in which to start them; peer_names
    are those to start then, all that ship where none is named.
    """

    depths: tuple[int, ...] = (0, 4)
    concurrency: tuple[int, ...] = (1, 8)
    systems: tuple[str, ...] = SYSTEMS
    speculators: tuple[str, ...] = ("small_model", "ngram")
    prompts: int = 8
    max_tokens: int = 32
    passes: int = 2
    peers: tuple[tuple[str, str], ...] | Path = ()
    peer_names: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        unknown = set(self.systems) - set(SYSTEMS)
        if unknown:
            raise ConfigError(f"no system called {', '.join(sorted(unknown))}; there are: {', '.join(SYSTEMS)}")
        known = [drafting.NO_SPECULATOR, *folders.names_in("drafting")]
        if wrong := sorted(set(self.speculators) - set(known)):
            raise ConfigError(f"no speculator called {', '.join(wrong)}; there are: {', '.join(known)}")
        if not self.systems or ("local" in self.systems and not self.speculators):
            raise ConfigError("--systems and --speculators take at least one name each")
        if not self.depths or min(self.depths) < 0 or not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError("--depth takes numbers from 0, --concurrency numbers from 1")
        if not 1 <= self.prompts <= len(CHATS):
            raise ConfigError(f"--prompts takes 1 to {len(CHATS)}, found {self.prompts}")
        if self.max_tokens < 1 or self.passes < 1:
            raise ConfigError("--max-tokens and --passes take numbers from 1")
        if isinstance(self.peers, Path) and not self.peers.is_dir():
            raise ConfigError(f"there is no folder {self.peers}; `specserve bench peer-env NAME {self.peers}` makes it")
        if self.peer_names and not isinstance(self.peers, Path):
            raise ConfigError("--peer-names says which peers of a folder to start; --peers takes the folder")

    def environments(self) -> list[Environment]:
        """Those of the peers to start. Raises ConfigError for an unknown one."""
        if not isinstance(self.peers, Path):
            return []
        return [Environment.of(name, self.peers) for name in self.peer_names or peer_environments.names()]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table; depth None is the system's own affair."""

    system: System
    depth: int | None
    concurrency: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A case and what its passes brought."""

    case: Case
    outcomes: Sequence[Outcome]


def compare(config: Config, options: Options, progress: Progress) -> list[Row]:
    """Run everything and return the rows. Raises ConfigError, or the first error of a system."""
    options.check()
    environments = options.environments()
    if (most := max(options.concurrency)) > options.prompts:
        progress(f"warning: concurrency {most} exceeds the {options.prompts} prompts; no more than those run at once")
    deepest = max(options.depths)
    # Passes repeat the prompts, and not every system keeps them for the next time.
    engine = config.engine.model_copy(update={"depth": deepest, "prefix_cache": False})
    config = config.model_copy(update={"engine": engine})
    folder = prepare(config.target, progress, role="target")
    prompts = chat_prompts(Tokenizer.load(folder), options.prompts)
    ours: list[Measured] = []
    if "transformers" in options.systems or "local" in options.systems:
        with _in_process(config, options, progress) as cases:
            ours += _measure(cases, prompts, options, progress)
        gc.collect()
    if "ray" in options.systems:
        with _through_ray(config, options, progress) as cases:
            ours += _measure(cases, prompts, options, progress)
    gc.collect()
    reference = _reference(ours)
    rows = [_row(one, reference) for one in ours]
    for door in _doors(config, prompts, options, environments, progress):
        rows += _peer_rows(door, reference, prompts, options, progress)
    return rows


def _reference(measured: Sequence[Measured]) -> Outcome | None:
    """Our own plain answers, of a system that shows their text too where there is one."""
    plain = [one for one in measured if one.case.depth == 0 and one.case.system.name.startswith("specserve")]
    best = sorted(plain, key=lambda one: one.outcomes[-1].texts is None)
    return best[0].outcomes[-1] if best else None


@dataclass(frozen=True, slots=True)
class Door:
    """A way into a peer. mode and depth None are the peer's own affair."""

    name: str
    mode: str | None
    depth: int | None
    opened: Callable[[], AbstractContextManager[Peer]]


def _doors(
    config: Config, prompts: Prompts, options: Options, environments: Sequence[Environment], progress: Progress
) -> Iterator[Door]:
    """Into the servers that others started, or the ones to start: one for each way of decoding that a peer has."""
    if not isinstance(options.peers, Path):
        for name, url in options.peers:
            yield Door(name, None, None, partial(Peer, name, url))
        return
    work = _work(config, prompts, options, progress)
    for environment in environments:
        # One that is not there fails once, not in every way that it might decode.
        for mode in work.modes(environment) if environment.version() else ["plain"]:
            depth = 0 if mode == "plain" else work.depth
            yield Door(environment.name, mode, depth, partial(started, environment, mode, work, progress))


def _work(config: Config, prompts: Prompts, options: Options, progress: Progress) -> Work:
    depth = max(options.depths)
    with_draft = depth > 0 and config.draft.speculator == "small_model"  # no other engine takes our heads
    return Work(
        target=prepare(config.target, progress, role="target"),
        draft=prepare(config.draft_model, progress, role="draft") if with_draft else None,
        depth=depth,
        requests=max(options.concurrency),
        context=max(map(len, prompts)) + options.max_tokens + depth + 1,
        threads=len(os.sched_getaffinity(0)),
    )


def _shortened(message: str) -> str:
    """A message's first line and, where it goes on with what a server wrote, the last."""
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"


def _peer_rows(
    door: Door, reference: Outcome | None, prompts: Prompts, options: Options, progress: Progress
) -> list[Row]:
    """A peer that is not there, or does not do what is asked, has a row that says so."""
    try:
        with door.opened() as peer:
            measured = _measure(_cases(peer, (door.depth,), options.concurrency), prompts, options, progress)
    except SpecserveError as error:
        progress(f"skipped {door.name}: {error.message}")
        why = f"skipped: {_shortened(error.message)}"
        return [_cells(door.name, why if door.mode is None else f"{door.mode}, {why}")]
    return [_row(one, reference) for one in measured]


def chat_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """The first `count` shipped prompts in the model's chat template."""
    return [tokenizer.chat_prompt([{"role": "user", "content": text}]) for text in CHATS[:count]]


@contextmanager
def _in_process(config: Config, options: Options, progress: Progress) -> Iterator[list[Case]]:
    """Cases that share this process; plain decoding is measured on the first engine only."""
    with ExitStack() as stack:
        cases = _transformers_cases(config, options, progress) if "transformers" in options.systems else []
        depths = options.depths
        for speculator in options.speculators if "local" in options.systems else ():
            engine = stack.enter_context(LocalEngine(_with_speculator(config, speculator), progress=progress))
            cases += _cases(Local(engine), depths, options.concurrency)
            depths = tuple(depth for depth in depths if depth > 0)
        yield cases


def _with_speculator(config: Config, speculator: str) -> Config:
    return config.model_copy(update={"draft": config.draft.model_copy(update={"speculator": speculator})})


def _transformers_cases(config: Config, options: Options, progress: Progress) -> list[Case]:
    progress("loading transformers' model")
    folder = prepare(config.target, progress, role="target")
    cases = [Case(TransformersGenerate(folder), 0, 1)]
    depth = max(options.depths)
    if depth > 0 and "small_model" in options.speculators:
        assistant = prepare(config.draft_model, progress, role="draft")
        cases.append(Case(TransformersGenerate(folder, assistant=assistant), depth, 1))
    many = [count for count in options.concurrency if count > 1]
    if many:
        batched = TransformersGenerate(folder, batched=True)
        cases += [Case(batched, 0, count) for count in many]
    return cases


def _cases(system: System, depths: Sequence[int | None], concurrency: Sequence[int]) -> list[Case]:
    return [Case(system, depth, count) for count in concurrency for depth in depths]


@contextmanager
def _through_ray(config: Config, options: Options, progress: Progress) -> Iterator[list[Case]]:
    """A local Ray cluster with the same pair, asked over HTTP; model-free speculators are asked for by request."""
    from specserve.cluster.launch import running

    server = config.server.model_copy(update={"host": "127.0.0.1", "port": 0})
    progress("starting Ray")
    with running(config.model_copy(update={"server": server})) as (base_url, served), ExitStack() as stack:
        asked = [name for name in options.speculators if name in drafting.guessers_of(served.draft)]
        drafted = [depth for depth in options.depths if depth > 0]
        cases: list[Case] = []
        own = served.draft.told_names
        for speculator in dict.fromkeys([own, *asked]):
            source = None if speculator == own else speculator
            system = Http(base_url, served.served_name, speculator, source=source)
            stack.callback(system.close)
            cases += _cases(system, drafted if source else options.depths, options.concurrency)
        yield cases


def _measure(cases: Sequence[Case], prompts: Prompts, options: Options, progress: Progress) -> list[Measured]:
    for case in cases:  # warm up: first-time allocations and imports belong to nobody
        case.system.run(prompts[:1], 4, case.depth or 0, 1)
    outcomes: dict[int, list[Outcome]] = {index: [] for index in range(len(cases))}
    for number in range(options.passes):
        for index, case in enumerate(cases):
            told = (
                f"pass {number + 1} of {options.passes}: {case.system.name} {_mode(case)}, {case.concurrency} at a time"
            )
            progress(told)
            outcome = case.system.run(prompts, options.max_tokens, case.depth or 0, case.concurrency)
            progress(f"{told}: {outcome.tokens_per_s:.1f} tokens/s")  # a run of many engines may be cut short
            outcomes[index].append(outcome)
    return [Measured(case, outcomes[index]) for index, case in enumerate(cases)]


def _mode(case: Case) -> str:
    """Our own engines at depth 0 decode plainly, whatever they would draft with."""
    return "plain" if case.depth == 0 and case.system.name.startswith("specserve") else case.system.mode


def _row(measured: Measured, reference: Outcome | None) -> Row:
    case, outcomes = measured.case, measured.outcomes
    last = outcomes[-1]
    overheads = [one.overhead_ms_per_round for one in outcomes if one.overhead_ms_per_round is not None]
    return _cells(
        case.system.name,
        _mode(case),
        depth=case.depth,
        concurrency=case.concurrency,
        tokens_per_s=median(one.tokens_per_s for one in outcomes),
        tokens_per_round=last.tokens / last.rounds if last.rounds else None,
        acceptance=last.kept / last.drafted if last.drafted and last.kept is not None else None,
        overhead_ms_per_round=median(overheads) if overheads and case.concurrency == 1 else None,
        equal_answers=None if reference is None else last.answers_equal_to(reference),
        version=case.system.version,
    )


_COLUMNS = (
    *("depth", "concurrency", "tokens_per_s", "tokens_per_round", "acceptance", "overhead_ms_per_round"),
    *("equal_answers", "version"),
)


def _cells(system: str, mode: str, **found: float | str | None) -> Row:
    """One line of the table; what was not found stays empty. equal_answers counts those that are our plain ones."""
    return {"system": system, "mode": mode} | {name: found.get(name) for name in _COLUMNS}
