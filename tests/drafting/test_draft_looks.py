"""On a device that is not the host's, each drafted step is read once, and the dists that are shipped once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pretend_device import ELSEWHERE, PretendDevice, there
from table_backend import TableBackend
from worker_messages import Part, ints, opened, plan

from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import DenseDists, SparseDists, Workspace
from specserve.transport.messages import PlanAhead, Push, PushAhead
from specserve.tree_shape import TreeShape

VOCAB, DEPTH = 9, 3
TABLE = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
OPTIONS = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.8},
    {"rule": "coupled"},
    {"presence_penalty": 0.5, "logit_bias": ((1, 2.0),)},
    {"allowed_token_ids": (1, 2, 3)},
]
PLAN = plan([Part(0, 0, [1, 2], [0, 1], slots=[0, 1, 2]), Part(1, 0, [5], [2], slots=[3, 4])])


class OnDevice(TableBackend):
    """Its logits are elsewhere."""

    device = ELSEWHERE

    def forward(self, batch):
        """See `TableBackend`."""
        return there(super().forward(batch))


SHAPES = [TreeShape((3, 2, 1), 3, 15), TreeShape(None, 3, 8)]


def made(on_device: bool, ranks: int = 0, slots: int = 64, **worker: object) -> DraftWorker:
    """A worker on a model here or there."""
    backend = OnDevice(TABLE) if on_device else TableBackend(TABLE)
    backend.allocate(64, 4)
    workspace = Workspace(slots, SparseDists(slots, VOCAB, backend.device), backend.device, ranks=ranks)
    return DraftWorker(SmallModel(backend, VOCAB), workspace, vocab_size=VOCAB, block_tokens=4, **worker)


@pytest.mark.parametrize("shape", SHAPES, ids=["static", "dynamic"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_trees_grow_on_a_device_as_on_the_host(shape: TreeShape, options: dict) -> None:
    """The same siblings and parents; they look more often than once a level."""

    def grown(on_device: bool) -> tuple[list[int], list[int]]:
        worker = made(on_device, shape=shape)
        count = shape.parents(3)
        parts = [
            Part(row, 0, [1, 2], range(8 * row, 8 * row + 8), slots=range(20 * row, 20 * row + count)) for row in (0, 1)
        ]
        for part in parts:
            worker.handle(opened(part.row, seed=part.row, tokens=(1, 2), prompt_length=1, **options))
        (push,) = worker.handle(replace(plan(parts), levels=ints([3, 3]), nodes=ints([shape.nodes(3)] * 2)))
        assert isinstance(push, Push), push
        return push.tokens.tolist(), push.parents.tolist()

    expected = grown(False)
    with PretendDevice():
        assert grown(True) == expected


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drafting_ahead_on_a_device_is_drafting_ahead_on_the_host(options: dict) -> None:
    """Guesses behind a whole text, by rank or by the target's noise, and the branches that grow from them."""

    def ahead(on_device: bool) -> list[list[int]]:
        worker = made(on_device, ranks=4)
        worker.handle(opened(1, seed=11, tokens=(1, 2), prompt_length=1, **options))
        told = {"epochs": 0, "bases": 2, "text_starts": 0, "text_lengths": 2, "starts": 0, "chain_lengths": 0}
        told |= {"table_lengths": 1, "tables": 0, "branch_counts": 2, "next_slots": -1}
        each = {"parents": 0, "firsts": 1, "depths": 3, "own_lengths": 2, "copies": 0}
        message = PlanAhead(
            plan=1,
            rows=np.array([1]),
            **{name: ints([value]) for name, value in told.items()},
            **{name: ints([value] * 2) for name, value in each.items()},
            ranks=ints([0, 1]),
            texts=ints([1, 2]),
            chain_slots=ints([]),
            next_plans=np.array([0]),
            slots=ints(range(4, 10)),
            own_blocks=ints([2, 3, 4, 5]),
        )
        pushes = list(worker.handle(message))
        assert all(isinstance(push, PushAhead) for push in pushes), pushes
        return [push.tokens.tolist() for push in pushes]

    expected = ahead(False)
    assert len(expected) == 4
    assert all(expected)
    with PretendDevice():
        assert ahead(True) == expected


def drafted(backend: TableBackend, form: str, ranks: int, choices: list[dict]) -> tuple[Push, list[list[int]]]:
    backend.allocate(64, 4)
    store = SparseDists(32, 4, backend.device) if form == "sparse" else DenseDists(32, VOCAB, backend.device)
    workspace = Workspace(32, store, backend.device, ranks=ranks)
    worker = DraftWorker(SmallModel(backend, VOCAB), workspace, vocab_size=VOCAB)
    for row, options in enumerate(choices):
        worker.handle(opened(row, seed=5 + row, tokens=(1, 2), prompt_length=1, **options))
    (push,) = worker.handle(PLAN)
    assert isinstance(push, Push), push
    return push, workspace.ranked(PLAN.slots)


def looks(form: str, ranks: int, choices: list[dict]) -> int:
    """How often a plan was looked at, which says on the device what it says on the host."""
    expected = drafted(TableBackend(TABLE), form, ranks, choices)
    with PretendDevice() as device:
        found = drafted(OnDevice(TABLE), form, ranks, choices)
    assert found[0].tokens.tolist() == expected[0].tokens.tolist()
    assert found[0].dists.rows.tolist() == expected[0].dists.rows.tolist()
    assert found[1] == expected[1]
    assert not device.waits
    return sum(device.looks.values())


@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_is_read_once(form: str, ranks: int, options: dict) -> None:
    """Token, health and what else was likely, together; at the end what was drawn from, where it is shipped."""
    shipped = options.get("temperature") != 0 and options.get("rule") != "coupled"
    assert looks(form, ranks, [options] * 2) == DEPTH + shipped


def test_steps_of_many_kinds_are_read_once() -> None:
    """One row is greedy and one races with the target's noise."""
    assert looks("sparse", 2, [{"rule": "coupled"}, {"temperature": 0.0}]) == DEPTH
    assert looks("sparse", 2, [{"rule": "coupled"}, {"top_p": 0.9}]) == DEPTH + 1
