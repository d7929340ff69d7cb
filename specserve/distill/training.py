"""The training loop: one student, a corpus on disk, a loss that is the acceptance's friend, and measures of it.

The loss is the cross-entropy to a mixture of the target's dist and its likeliest token: the first is what a sampled
draft is accepted by, the second what a greedy one is. The learning rate rises, stays, and falls to 0 over the last
part (warm-up, stable, decay: Hu et al. 2024), so that a run can be prolonged from a checkpoint of its stable part.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from specserve.distill import Progress, checkpoints, corpus
from specserve.distill.corpus import Example
from specserve.distill.loss import cross_entropies, logits_of
from specserve.distill.measures import Acceptance
from specserve.distill.optimiser import InputScaledAdamW
from specserve.distill.students import Student
from specserve.errors import ConfigError

_POOLED_SHARDS = 6
_HELD_OUT_EVERY = 16
_STAGE = "training"
_MEASURED = 256  # held-out examples
_SIZED_BY = 6  # batches that say how large inputs are


@dataclass(frozen=True, slots=True)
class Schedule:
    """steps: optimiser steps in all; batch_tokens: padded tokens in each.

    greedy_share of the loss's goal is the target's likeliest token; message_weight is that of a place in the user's
    message beside 1 for one in the answer. So many drafted places of a chain are taught (`unrolled`; students whose
    places are all alike have one), each with later_share of the weight of the one before. Every measure_every steps a
    student is measured with chains of this depth, and the run is saved.
    """

    steps: int = 2000
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    warm_up: int = 50
    decay_share: float = 0.3
    weight_decay: float = 0.01
    greedy_share: float = 0.5
    message_weight: float = 0.3
    unrolled: int = 3
    later_share: float = 0.8
    measure_every: int = 100
    depth: int = 4
    seed: int = 1

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        falling = (self.steps - step) / max(1.0, self.steps * self.decay_share)
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up, falling)


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded examples: tokens int64 [B, n], hidden [B, n, width], weights float32 [B, n], 0 where nothing is taught."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(self.tokens.to(device), self.hidden.to(device), self.weights.to(device))


def batch_of(examples: Sequence[Example], message_weight: float) -> Batch:
    """One batch of these examples."""
    weights = []
    for example in examples:
        weight = torch.zeros(len(example.tokens))
        weight[example.start - 1 :] = message_weight
        weight[example.answer - 1 :] = 1.0
        weights.append(weight)
    return Batch(
        pad_sequence([example.tokens for example in examples], batch_first=True),
        pad_sequence([example.hidden for example in examples], batch_first=True),
        pad_sequence(weights, batch_first=True),
    )


def split(folder: Path) -> tuple[list[Path], list[Path]]:
    """Shards to learn from, and shards held out: by their numbers, so that a growing corpus moves none.

    Raises ConfigError for a corpus of fewer than three shards.
    """
    paths = corpus.shards(folder)
    held_out = [path for path in paths if corpus.number_of(path) % _HELD_OUT_EVERY == 2]
    if not held_out or len(paths) < 3:
        raise ConfigError(
            f"{folder} holds {len(paths)} shards of examples, and training needs 3, one of them held out: "
            f"give more text, or a smaller --tokens, which makes shards smaller"
        )
    return [path for path in paths if path not in held_out], held_out


def batches(folder: Path, schedule: Schedule) -> Iterator[Batch]:
    """Batches without end: shards in seeded order, a few pooled and cut into batches of like lengths."""
    noise = random.Random(schedule.seed)
    while True:
        paths = split(folder)[0]
        noise.shuffle(paths)
        for begin in range(0, len(paths), _POOLED_SHARDS):
            pool = [one for path in paths[begin : begin + _POOLED_SHARDS] for one in corpus.read_shard(path)]
            yield from _of_like_lengths(pool, schedule, noise)


def _of_like_lengths(pool: list[Example], schedule: Schedule, noise: random.Random) -> Iterator[Batch]:
    pool.sort(key=lambda example: (len(example.tokens), noise.random()))
    groups: list[list[Example]] = [[]]
    for example in pool:
        if (len(groups[-1]) + 1) * len(example.tokens) > schedule.batch_tokens and groups[-1]:
            groups.append([])
        groups[-1].append(example)
    noise.shuffle(groups)
    for group in groups:
        yield batch_of(group, schedule.message_weight)


class Head:
    """The target's head for the ids int64 [m] that the draft may say: frozen. weight [V, width] is the whole head.

    dtype is what everything is computed in.
    """

    def __init__(self, weight: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> None:
        self.weight = weight.detach()[ids.to(weight.device)].to(dtype)

    @property
    def device(self) -> torch.device:
        """Where it is, and where students have to be."""
        return self.weight.device

    def precision(self) -> torch.autocast:
        """Lets students compute in the head's dtype; their weights stay in float32."""
        narrow = self.weight.dtype != torch.float32
        return torch.autocast(self.device.type, torch.bfloat16, enabled=narrow)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [..., m] of hidden [..., width]."""
        return logits_of(hidden, self.weight)


def loss_of(student: Student, head: Head, batch: Batch, schedule: Schedule) -> torch.Tensor:
    """The weighted mean loss of one batch, over the drafted places that are taught."""
    batch = batch.to(head.device)
    with head.precision():
        places = list(student.unrolled(batch.tokens, batch.hidden, schedule.unrolled))
    n = batch.tokens.shape[1]
    taught = batch.weights > 0
    taught[:, : n - places[-1].shape[1]] = False  # before the first chain's last place
    weights = batch.weights[taught]
    states = [place[taught[:, n - place.shape[1] :]] for place in places]
    each = cross_entropies(states, batch.hidden[taught], head.weight, weights, schedule.greedy_share)
    shares = torch.tensor([schedule.later_share**place for place in range(len(places))], device=head.device)
    return (each * shares).sum() / weights.sum() / shares.sum()


def evaluate(student: Student, head: Head, paths: Sequence[Path], depth: int, most: int) -> Acceptance:
    """What a chain of this depth keeps on held-out answers."""
    found = Acceptance(depth)
    examples = list(islice(corpus.examples_of(paths), most))
    examples.sort(key=lambda example: len(example.tokens))
    with torch.inference_mode(), head.precision():
        for begin in range(0, len(examples), 16):
            some = examples[begin : begin + 16]
            batch = batch_of(some, 0.0).to(head.device)
            places = list(student.unrolled(batch.tokens, batch.hidden, depth))
            for row, example in enumerate(some):
                own = slice(max(example.answer - 1, batch.tokens.shape[1] - places[-1].shape[1]), len(example.tokens))
                drafts = [head.logits(_at(states, batch, own)[row]) for states in places]
                found.add(head.logits(batch.hidden[row, own]), drafts, greedy=example.temperature == 0)
    return found


def _at(states: torch.Tensor, batch: Batch, places: slice) -> torch.Tensor:
    """The states of these places, of a tensor that lacks the first ones."""
    lead = batch.tokens.shape[1] - states.shape[1]
    return states[:, places.start - lead : places.stop - lead]


def train(
    student: Student, head: Head, corpus_folder: Path, run_folder: Path, schedule: Schedule, progress: Progress
) -> float:
    """Train up to the schedule's last step, going on from the run folder where it has a run. Returns the best merit.

    Every `measure_every` steps the student is measured on held-out answers, the run saved, and the best student kept.
    """
    optimiser = InputScaledAdamW(student, weight_decay=schedule.weight_decay)
    if not checkpoints.has_run(run_folder):
        some = list(islice(batches(corpus_folder, schedule), _SIZED_BY))
        optimiser.measure(lambda: [loss_of(student, head, batch, schedule) for batch in some])
    first, best = checkpoints.load_run(run_folder, student, optimiser)
    stream = islice(batches(corpus_folder, schedule), first, None)  # the batches that an unbroken run would see
    mean = 0.0
    for step in range(first, schedule.steps):
        loss = _step(student, head, next(stream), optimiser, schedule, step)
        mean = loss if step == first else 0.95 * mean + 0.05 * loss
        progress.advance(_STAGE, step + 1, schedule.steps)
        if (step + 1) % schedule.measure_every and step + 1 < schedule.steps:
            continue
        found = evaluate(student, head, split(corpus_folder)[1], schedule.depth, _MEASURED)
        progress.say(f"step {step + 1} of {schedule.steps}: loss {mean:.3f}; held out: {found}")
        if found.merit > best:
            best = found.merit
            checkpoints.save_best(run_folder, student)
        checkpoints.save_run(run_folder, step + 1, student, optimiser, best)
    return best


def _step(
    student: Student, head: Head, batch: Batch, optimiser: torch.optim.Optimizer, schedule: Schedule, step: int
) -> float:
    for group in optimiser.param_groups:
        group["lr"] = schedule.rate(step)
    optimiser.zero_grad()
    loss = loss_of(student, head, batch, schedule)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimiser.step()
    return float(loss.detach())
