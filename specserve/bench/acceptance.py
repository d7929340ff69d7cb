"""`specserve bench acceptance`: how many drafted tokens each rule keeps on the configured pair and shipped prompts.

All rules answer the same seeded requests, rule by rule, in one engine; at temperature 0 they all walk greedily.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from specserve.bench.compare import chat_prompts
from specserve.bench.prompts import CHATS
from specserve.bench.report import Row
from specserve.config import Config, override, parse
from specserve.errors import ConfigError
from specserve.local import LocalEngine
from specserve.types import Request, RequestId, RuleName, Sampling
from specserve.verification import all_rules

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. rules empty means all but made-up ones; depth is the chain length, tokens those of each answer."""

    rules: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    depth: int = 4
    prompts: int = 8
    max_tokens: int = 48

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if not self.temperatures or min(self.temperatures) < 0 or self.depth < 1 or self.max_tokens < 2:
            raise ConfigError("--temperature takes numbers from 0, --depth numbers from 1, --max-tokens from 2")
        if not 1 <= self.prompts <= len(CHATS):
            raise ConfigError(f"--prompts takes 1 to {len(CHATS)}, found {self.prompts}")


@dataclass(frozen=True, slots=True)
class _Firsts:
    """First drafted tokens of chains so far: offered and kept."""

    offered: float
    kept: float

    @staticmethod
    def of(exposition: str) -> _Firsts:
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(exposition)
            for sample in family.samples
            if sample.labels.get("position") == "0"
        }
        return _Firsts(
            found.get("specserve_spec_decode_num_draft_tokens_per_pos_total", 0.0),
            found.get("specserve_spec_decode_num_accepted_tokens_per_pos_total", 0.0),
        )


def measure(config: Config, options: Options, progress: Progress) -> list[Row]:
    """One row for each temperature and rule. Raises ConfigError."""
    options.check()
    known = all_rules()
    rules = options.rules or tuple(name for name in known if name != "synthetic")
    if unknown := set(rules) - set(known):
        raise ConfigError(f"no rule called {sorted(unknown)}; there are: {', '.join(known)}")
    config = parse(override(config.model_dump(), {"engine.depth": options.depth, "draft.lookup": "none"}))
    with LocalEngine(config, progress=progress) as engine:
        prompts = chat_prompts(engine.tokenizer, options.prompts)
        rows = []
        for temperature in options.temperatures:
            for rule in rules:
                progress(f"temperature {temperature}, {rule}")
                rows.append(_row(engine, prompts, rule, known[rule].LOSSLESS, temperature, options))
    return rows


def _row(
    engine: LocalEngine,
    prompts: list[list[int]],
    rule: RuleName,
    lossless: bool,
    temperature: float,
    options: Options,
) -> Row:
    before = _Firsts.of(engine.metrics_text())
    done = engine.complete(
        [
            Request(
                RequestId(f"{rule}-{temperature}-{number}"),
                tuple(prompt),
                options.max_tokens,
                Sampling(temperature),
                seed=number,
                ignore_eos=True,
                depth=options.depth,
                rule=rule,
            )
            for number, prompt in enumerate(prompts)
        ]
    )
    after = _Firsts.of(engine.metrics_text())
    rounds, tokens = (sum(getattr(one.stats, name) for one in done) for name in ("rounds", "generated_tokens"))
    return {
        "temperature": temperature,
        "rule": rule,
        "lossless": "yes" if lossless else "NO",
        "first_position": (after.kept - before.kept) / max(1.0, after.offered - before.offered),
        "tokens_per_round": tokens / rounds,
        "rounds": rounds,
    }
