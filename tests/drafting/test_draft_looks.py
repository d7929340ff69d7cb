"""On a device that is not the host's, each drafted step is read once, and the dists that are shipped once."""

from __future__ import annotations

import pytest
import torch
from pretend_device import ELSEWHERE, PretendDevice, there
from table_backend import TableBackend
from worker_messages import Part, opened, plan

from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import DenseDists, SparseDists, Workspace
from specserve.transport.messages import Push

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
