"""`specserve distill` from beginning to end: a corpus, a student, training, and a folder that serve takes as draft.

All of it lives in one working folder and goes on from there when it is called again: the corpus grows until it has
the tokens asked for, training goes on from its last saved step, and the draft is the best student so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specserve.config import ModelConfig
from specserve.distill import Progress, checkpoints, corpus, reading, training, vocabulary, writing
from specserve.distill.corpus import Example
from specserve.distill.heads import HeadStudent, layers_of
from specserve.distill.precision import quick_dtype
from specserve.distill.small import SmallStudent
from specserve.distill.students import Origin, Student
from specserve.distill.training import Head, Schedule
from specserve.errors import ConfigError
from specserve.models import loading

_SHARD_TOKENS = 32_768
_FEWEST_SHARDS = 4
_FITTED_ON = 300  # examples for the closed form
_IDS = "ids.safetensors"

KINDS: dict[str, Callable[[Any, tuple[int, ...]], Student]] = {
    "small": lambda target, layers: SmallStudent(target, layers or (0, 1)),
    "eagle": lambda target, _: HeadStudent(target),
    "eagle3": lambda target, layers: HeadStudent(target, layers or layers_of(target)),
}


@dataclass(frozen=True, slots=True)
class Options:
    """target and data are sources: a target as in the configuration, a file of text or None for the target's own.

    kind is that of the draft, one of `KINDS`. tokens is the corpus's size, counted without what all prompts share; rows
    are written at once; layers of the target are what a small student starts from or an EAGLE-3 head reads, none for
    the kind's own choice; ids is the size of the draft's vocabulary. out is the draft's folder. start is that of a
    draft whose weights training begins at, and whose vocabulary it keeps.
    """

    target: str
    out: Path
    work: Path
    data: Path | None = None
    tokens: int = 400_000
    rows: int = 256
    kind: str = "small"
    layers: tuple[int, ...] = ()
    ids: int = 8192
    start: Path | None = None
    device: str = "auto"
    seed: int = 11
    schedule: Schedule = field(default_factory=Schedule)

    @property
    def shard_tokens(self) -> int:
        """Tokens in one shard of the corpus; a small corpus has a few shards, too."""
        return min(_SHARD_TOKENS, self.tokens // _FEWEST_SHARDS)

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if self.kind not in KINDS:
            raise ConfigError(f"no kind of draft called {self.kind!r}; there are: {', '.join(KINDS)}")
        if self.layers and self.kind == "eagle":
            raise ConfigError(
                f"an EAGLE head reads the target's last state, not layers {list(self.layers)}: see eagle3"
            )
        schedule = self.schedule
        for name, value, least in (
            ("tokens", self.tokens, 1000),
            ("rows", self.rows, 1),
            ("ids", self.ids, 64),
            ("steps", schedule.steps, 1),
            ("batch-tokens", schedule.batch_tokens, 1),
            ("unrolled", schedule.unrolled, 1),
        ):
            if value < least:
                raise ConfigError(f"--{name} must be at least {least}, found {value}")
        if schedule.learning_rate <= 0:
            raise ConfigError(f"--learning-rate must be above 0, found {schedule.learning_rate}")


def distill(options: Options, progress: Progress) -> Path:
    """Run whatever is not done yet; the draft's folder. Raises ConfigError."""
    options.check()
    torch.manual_seed(options.seed)
    target_folder = loading.prepare(ModelConfig(source=options.target), progress.say)
    device = loading.device_of(ModelConfig(device=options.device))
    dtype = quick_dtype(device)
    progress.say(f"computing in {dtype}, which this {device.type} multiplies quickly")
    texts, run = options.work / "corpus", options.work / "run"
    for folder in (texts, run):
        folder.mkdir(parents=True, exist_ok=True)
    writer = ModelConfig(source=str(target_folder), device=options.device, dtype=dtype)
    fill(texts, writer, options, progress)
    target = loading.load_model(target_folder, ModelConfig(source=str(target_folder), device=options.device))
    student = KINDS[options.kind](target, options.layers)
    ids = _begun(student, texts, run, target.config.vocab_size, options, progress)
    training.train(
        student, Head(target.lm_head.weight, ids, getattr(torch, dtype)), texts, run, options.schedule, progress
    )
    student.write(options.out, checkpoints.load_best(run), ids, Origin(options.target, options.seed))
    speculator = "small_model" if options.kind == "small" else "eagle"
    trial = f"specserve bench speculators --speculators {speculator} --draft {options.out}"
    progress.say(f"the draft is in {options.out}; try it with `{trial}`")
    return options.out


def fill(texts: Path, target: ModelConfig, options: Options, progress: Progress) -> None:
    """Add shards until the corpus has its tokens, or holds the whole of a file that has fewer."""
    paths = corpus.shards(texts)
    have = sum(corpus.taught_tokens(path) for path in paths)
    if have >= options.tokens:
        return
    number, some, size = len(paths), list[Example](), 0
    for example in _source(target, options, paths):
        some.append(example)
        size += len(example.tokens) - example.start
        progress.advance("writing text", min(have + size, options.tokens), options.tokens)
        if size >= options.shard_tokens or have + size >= options.tokens:
            corpus.write_shard(texts, number, some)
            number, some, have, size = number + 1, [], have + size, 0
        if have >= options.tokens:
            return
    if some:
        corpus.write_shard(texts, number, some)


def _source(target: ModelConfig, options: Options, paths: Sequence[Path]) -> Iterator[Example]:
    """What a corpus of these shards goes on with. A writer that is called again begins other texts."""
    if options.data is not None:
        known = sum(corpus.example_count(path) for path in paths)
        return reading.Reader(target, options.data).examples(known)
    seed = options.seed + 1000 * len(paths)
    return writing.Writer(target, rows=options.rows, seed=seed).examples()


def _begun(
    student: Student, texts: Path, run: Path, vocab_size: int, options: Options, progress: Progress
) -> torch.Tensor:
    """The student as it is before its first step, where the run has none yet; the draft's vocabulary, int64 [m]."""
    learn, held_out = training.split(texts)
    ids = None if options.start is None else student.begin_at(options.start)
    if not (run / _IDS).is_file():
        if ids is None:
            ids = vocabulary.likeliest_ids(corpus.examples_of(learn), vocab_size, options.ids)
        share = vocabulary.covered(corpus.examples_of(held_out), ids, vocab_size)
        progress.say(f"the draft says {len(ids)} of {vocab_size} ids: {share:.1%} of the tokens in held-out answers")
        save_file({"ids": ids}, run / _IDS)
    chosen: torch.Tensor = load_file(run / _IDS)["ids"]
    if ids is not None and not torch.equal(ids, chosen):
        raise ConfigError(
            f"{run} holds a run whose draft says other ids than the one in {options.start}; give another --work"
        )
    if options.start is None and not checkpoints.has_run(run):
        progress.say("fitting what has a closed form")
        student.fit(islice(corpus.examples_of(learn), _FITTED_ON))
    return chosen
