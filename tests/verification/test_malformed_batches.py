"""Whatever the wire can carry, a worker answers and lives; a request that is wrong is wrong for itself only."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from mutations import mutated
from table_backend import TableBackend
from worker_messages import Part, ints, opened, plan, verify

from specserve.config import EngineConfig
from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import SparseDists, Workspace
from specserve.transport.messages import Failed, Push, Verdict
from specserve.types import Structured
from specserve.verification.verifier import Verifier

VOCAB = 9
CPU = torch.device("cpu")
GOOD = Part(2, 0, [4, 5], [2, 3], slots=[5])


def backend() -> TableBackend:
    model = TableBackend(torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)))
    model.allocate(64, 4)
    return model


def verifier():
    return Verifier(backend(), vocab_size=VOCAB), verify


def drafter():
    workspace = Workspace(16, SparseDists(16, VOCAB, CPU), CPU)
    return DraftWorker(SmallModel(backend(), VOCAB), workspace, vocab_size=VOCAB), plan


TREES = EngineConfig(depth=2, tree=(2,))


def tree_verifier():
    def batch(parts):
        trees = [replace(part, chain=[7, 8, 1]) for part in parts]
        return replace(verify(trees), parents=ints([-1, -1, 0] * len(parts)))

    return Verifier(backend(), vocab_size=VOCAB, engine=TREES), batch


def tree_drafter():
    def batch(parts):
        leased = [replace(part, slots=range(5 * part.row, 5 * part.row + 3)) for part in parts]
        return replace(plan(leased), levels=ints([2] * len(parts)), nodes=ints([4] * len(parts)))

    workspace = Workspace(16, SparseDists(16, VOCAB, CPU), CPU)
    speculator = SmallModel(backend(), VOCAB)
    return DraftWorker(speculator, workspace, vocab_size=VOCAB, shape=TREES.tree_shape), batch


@pytest.mark.parametrize("make", [verifier, drafter, tree_verifier, tree_drafter])
def test_a_spoilt_batch_is_answered_and_the_next_one_is_right(make):
    """100 spoilt batches: none raises, and a good one after each gets what it got before."""
    worker, batch = make()
    worker.handle(opened(1, temperature=0))
    worker.handle(opened(2, temperature=0))
    (before,) = worker.handle(batch([GOOD]))
    assert isinstance(before, Verdict | Push)
    failed = 0
    for seed in range(100):
        message = mutated(batch([Part(1, 0, [1, 2, 3], [0, 1], slots=[1, 2]), GOOD]), random.Random(seed))
        answers = list(worker.handle(message))
        assert len(answers) == 1
        failed += isinstance(answers[0], Failed)
        (after,) = worker.handle(batch([GOOD]))
        assert told(after) == told(before), seed
    assert failed > 30


@pytest.mark.parametrize("make", [verifier, drafter])
def test_a_spoilt_request_harms_nobody_else(make):
    """Opening never raises; the row at fault fails by its number or is served, and the other row goes on."""
    worker, batch = make()
    worker.handle(opened(2, temperature=0))
    (before,) = worker.handle(batch([GOOD]))
    broken = opened(1, repetition_penalty=1.5, logprobs=2, prompt_logprobs=1)
    for seed in range(60):
        assert worker.handle(mutated(broken, random.Random(seed))) == []
        worker.handle(batch([Part(1, 0, [1, 2, 3], [0, 1], slots=[1, 2])]))
        (after,) = worker.handle(batch([GOOD]))
        assert told(after) == told(before), seed


@pytest.mark.parametrize("make", [verifier, drafter])
def test_a_request_that_cannot_be_opened_fails_alone_and_by_its_number(make, monkeypatch):
    """An error while it is opened does not end the worker, and does not leave an earlier epoch in its place."""
    worker, batch = make()
    worker.handle(opened(1, epoch=0))
    monkeypatch.setattr("specserve.sampling.profiles.Constraint", lambda *_: 1 / 0)
    unservable = opened(1, epoch=0)
    object.__setattr__(unservable, "structured", Structured("regex", "a"))
    assert worker.handle(unservable) == []
    (answer,) = worker.handle(batch([Part(1, 0, [1, 2], [0], slots=[1])]))
    assert isinstance(answer, Failed)
    assert answer.rows.tolist() == [1]


def told(answer):
    """What an answer says, without how long it took."""
    if isinstance(answer, Verdict):
        return answer.kept.tolist(), answer.next.tolist()
    assert isinstance(answer, Push)
    return answer.chain_lengths.tolist(), answer.tokens.tolist()


@pytest.mark.parametrize("parents", [[-1, 1, 0], [-2, -1, 0], [-1, -1, 7]])
def test_a_row_that_is_no_tree_fails_alone(parents):
    """A node behind itself, or behind one that there is not; the other row's tree is named by nobody."""
    worker, batch = tree_verifier()
    for row in (1, 2):
        worker.handle(opened(row, temperature=0))
    message = batch([Part(1, 0, [1, 2, 3], [0, 1]), GOOD])
    (answer,) = worker.handle(replace(message, parents=ints([*parents, -1, -1, 0])))
    assert isinstance(answer, Failed)
    assert answer.rows.tolist() == [1]
