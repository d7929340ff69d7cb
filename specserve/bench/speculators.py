"""`specserve bench speculators`: what each speculator keeps on held-out prompts of several kinds, sampled or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specserve import folders
from specserve.bench.held_out import PROMPTS
from specserve.bench.report import Row
from specserve.config import Config, override, parse
from specserve.errors import ConfigError
from specserve.local import Completion, LocalEngine
from specserve.types import Request, RequestId, Sampling

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. depth is the chain length; prompts those of each kind, all where there are fewer."""

    speculators: tuple[str, ...] = ("small_model", "ngram", "suffix")
    kinds: tuple[str, ...] = tuple(PROMPTS)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    depth: int = 4
    prompts: int = 12
    max_tokens: int = 96

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if unknown := set(self.kinds) - set(PROMPTS):
            raise ConfigError(f"no prompts of kind {sorted(unknown)}; there are: {', '.join(PROMPTS)}")
        if unknown := set(self.speculators) - set(folders.names_in("drafting")):
            known = ", ".join(folders.names_in("drafting"))
            raise ConfigError(f"no speculator called {', '.join(sorted(unknown))}; there are: {known}")
        if not self.temperatures or min(self.temperatures) < 0 or min(self.depth, self.prompts) < 1:
            raise ConfigError("--temperature takes numbers from 0, --depth and --prompts numbers from 1")
        if self.max_tokens < 2:
            raise ConfigError(f"--max-tokens takes a number from 2, found {self.max_tokens}")


def measure(config: Config, options: Options, progress: Progress) -> list[Row]:
    """One row for each speculator, kind and temperature. Answers end where the target ends them. Raises ConfigError."""
    options.check()
    rows = []
    for speculator in options.speculators:
        changes = {"draft.speculator": speculator, "draft.lookup": "none", "engine.depth": options.depth}
        with LocalEngine(parse(override(config.model_dump(), changes)), progress=progress) as engine:
            for temperature in options.temperatures:
                for kind in options.kinds:
                    progress(f"{speculator}, {kind}, temperature {temperature}")
                    rows.append(_row(engine, speculator, kind, temperature, options))
    return rows


def _row(engine: LocalEngine, speculator: str, kind: str, temperature: float, options: Options) -> Row:
    prompts = [
        engine.tokenizer.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS[kind][: options.prompts]
    ]
    requests = [
        Request(
            RequestId(f"{kind}-{temperature}-{number}"),
            tuple(prompt),
            options.max_tokens,
            Sampling(temperature),
            seed=number,
        )
        for number, prompt in enumerate(prompts)
    ]
    done = engine.complete(requests)
    return {
        "speculator": speculator,
        "kind": kind,
        "temperature": temperature,
        **_figures(done, options.depth),
    }


def _figures(done: list[Completion], depth: int) -> dict[str, int | float | None]:
    """Tokens per decode round, and of the rounds that kept everything before a place, the share that kept it, too.

    Rounds at the end of an answer, where less than a whole chain is offered, count like any others.
    """
    kept = [sum(sum(one.stats.histogram[place : place + 1]) for one in done) for place in range(depth + 1)]
    rounds = sum(kept)
    tokens = sum(number * count for number, count in enumerate(kept, 1))
    reached = [sum(kept[place:]) for place in range(depth + 1)]
    shares = {f"kept_{n}": reached[n] / reached[n - 1] if reached[n - 1] else None for n in range(1, depth + 1)}
    return {"tokens_per_round": tokens / max(1, rounds), **shares, "rounds": rounds}
