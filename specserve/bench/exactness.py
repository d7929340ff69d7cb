"""`specserve bench exactness`: what rules put out, measured against the target's law, and against variants that are
known to be wrong, as a table and as pictures.

Tokens are drawn round after round with the workers' own noise from a first-order Markov target of 16 tokens and a draft
that is another one. Pearson's chi-square over all transitions then says whether they have the target's law. The rules
are the ones that are served; a variant breaks one thing around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from specserve.bench import expectations, figures
from specserve.bench.report import Row
from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.sampling.dists import draw, process
from specserve.sampling.noise import Purpose, token_keys, uniform
from specserve.sampling.race import race
from specserve.verification import FixedNoise, Judge, Rule, all_rules, judges_of
from specserve.verification._draft_rows import DraftRows

Progress = Callable[[str], None]

VOCAB, DEPTH = 16, 4
_ROWS = 500
_TOP_P = 0.8
_UNSURE = 0.15

Wrong = str
"""What is broken, in words; empty for a rule as it is served."""

ONE_NOISE = "one noise to propose and to choose"
DROPPED = "drafts dropped for their low probability"
UNFILTERED = "draft dists shipped as before top-p"
LOSSY = "made to be lossy"


@dataclass(frozen=True, slots=True)
class _Case:
    """A rule, what is broken around it, and the top-p of its requests."""

    name: str
    rule: Rule
    judge: Judge
    wrong: Wrong = ""
    top_p: float = 1.0


def measure(tokens: int, progress: Progress) -> list[Row]:
    """One row for each rule and broken variant: the p-value of what it put out, over at least `tokens` tokens each.

    Raises ConfigError for fewer tokens than a chi-square needs.
    """
    if tokens < 5000:
        raise ConfigError(f"--tokens takes numbers from 5000, found {tokens}")
    rows: list[Row] = []
    for case in _cases():
        progress(f"{case.name}{': ' if case.wrong else ''}{case.wrong}")
        counts = _transitions(case, tokens)
        rows.append(
            {
                "rule": case.name,
                "broken": case.wrong or None,
                "top_p": case.top_p,
                "tokens": int(counts.sum()),
                **_distances(counts, _models(case.top_p)[0]),
            }
        )
    return rows


def plot(rows: list[Row], by_temperature: list[Row], acceptance: Path | None, folder: Path) -> list[Path]:
    """Write the pictures: p-values and distances of the rows; what rules keep by exact expectation, one against the
    other and by temperature (rows of `expectations.by_temperature`); of a file of `bench acceptance`, the acceptance.

    Raises ConfigError for a folder or file that cannot be used.
    """
    pictures = {
        "p_values.svg": figures.p_values(rows),
        "distances.svg": figures.distances(rows),
        "kept_tokens.svg": figures.kept_tokens(list(expectations.expectations())),
        "temperatures.svg": figures.temperatures(by_temperature),
    }
    if acceptance is not None:
        pictures["acceptance.svg"] = figures.acceptance(acceptance)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            (folder / name).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write pictures to {folder}: {error.strerror}") from None
    return [folder / name for name in pictures]


def _cases() -> Iterator[_Case]:
    rules, judges = all_rules(), judges_of(EngineConfig())
    lossless = [name for name in judges if rules[name].LOSSLESS]
    for name in lossless:
        yield _Case(name, rules[name], judges[name])
    for name in lossless:
        yield _Case(name, rules[name], judges[name], top_p=_TOP_P)
    for name in [name for name in lossless if rules[name].NEEDS_DISTS]:
        yield _Case(name, rules[name], judges[name], ONE_NOISE)
        yield _Case(name, rules[name], judges[name], DROPPED)
        yield _Case(name, rules[name], judges[name], UNFILTERED, _TOP_P)
    for name in [name for name in judges if not rules[name].LOSSLESS]:
        yield _Case(name, rules[name], judges[name], LOSSY)


def _models(top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Dists of target and draft after each token, float32 [V, V], filtered."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.2
    draft = target + torch.randn(VOCAB, VOCAB, generator=generator) * 0.7
    plain = torch.ones(VOCAB)
    settings = (plain, plain * top_p, torch.zeros(VOCAB, dtype=torch.int64), VOCAB)
    return process(target, *settings), process(draft, *settings)


def _transitions(case: _Case, tokens: int) -> torch.Tensor:
    """float64 [V, V]: how often each token followed each, in answers to `_ROWS` seeds."""
    seeds, rows = torch.arange(_ROWS)[:, None], torch.arange(_ROWS)
    last, length = rows % VOCAB, torch.zeros(_ROWS, dtype=torch.int64)
    counts = torch.zeros(VOCAB * VOCAB, dtype=torch.float64)
    while counts.sum() < tokens:
        chain, kept, following = _round(case, seeds, last, length)
        for place in range(DEPTH + 1):
            emitted = place <= kept
            token = torch.where(place < kept, chain[:, min(place, DEPTH - 1)], following)
            counts += torch.bincount((last * VOCAB + token)[emitted], minlength=VOCAB * VOCAB)
            last = torch.where(emitted, token, last)
        length += kept + 1
    return counts.view(VOCAB, VOCAB)


def _round(
    case: _Case, seeds: torch.Tensor, last: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A chain for each row, and what the rule says of it."""
    target, draft = _models(case.top_p)
    positions = length[:, None] + torch.arange(DEPTH + 1)
    places = torch.arange(DEPTH)
    noise = FixedNoise(
        uniform(seeds, Purpose.ACCEPT, positions[:, :-1], 0, places),
        uniform(seeds, Purpose.CHOOSE, positions),
        token_keys(seeds, positions),
    )
    propose = uniform(seeds, Purpose.PROPOSE, positions[:, :-1], 0, places)
    read = [last]
    for place in range(DEPTH):
        by = noise.choose if case.wrong == ONE_NOISE else propose
        read.append(_pick(case.rule, draft[read[-1]], by[:, place], noise.keys[:, place]))
    contexts, chain = torch.stack(read, 1), torch.stack(read[1:], 1)
    shipped = (_models(1.0)[1] if case.wrong == UNFILTERED else draft)[contexts[:, :-1]]
    lengths = torch.full_like(length, DEPTH)
    if case.wrong == DROPPED:
        sure = shipped.gather(2, chain[..., None]).squeeze(2) >= _UNSURE
        lengths = sure.long().cumprod(-1).sum(-1)
    rows = DraftRows.whole(shipped) if case.rule.NEEDS_DISTS else DraftRows.certain(chain)
    return chain, *case.judge(target[contexts], rows, chain, lengths, noise)


def _pick(rule: Rule, dist: torch.Tensor, noise: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """How the rule's drafts are chosen from dist [m, V]."""
    if rule.DRAFT_PICKS == "sampling":
        return draw(dist, noise)
    return race(dist, keys) if rule.DRAFT_PICKS == "shared_noise" else dist.argmax(-1)


def _distances(counts: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """How far transitions are from the target's law.

    Pearson's statistic over the transitions that are possible and expected more than 5 times, by degree of freedom, and
    its p-value, which is 0 where impossible ones were seen; total variation distance, and the one that is expected by
    chance of so many tokens: of n draws, a count of probability p is off by √(2 n p (1 − p) / π) on average.
    """
    expected = target.double() * counts.sum(1, keepdim=True)
    looked_at = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[looked_at].sum()
    freedom = (looked_at.sum() - looked_at.any(1).sum()).double()
    p_value = torch.special.gammaincc(freedom / 2, statistic / 2)
    by_chance = (2 / math.pi * expected * (1 - target.double())).sqrt()
    return {
        "chi_square": float(statistic / freedom),
        "p_value": 0.0 if counts[target == 0].any() else float(p_value),
        "distance": float((counts - expected).abs().sum() / counts.sum() / 2),
        "by_chance": float(by_chance.sum() / counts.sum() / 2),
    }
