"""On a device that is not the host's, a round is read once, and what it needs is sent without waiting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pretend_device import ELSEWHERE, PretendDevice, there
from table_backend import TableBackend
from worker_messages import Part, opened, verify

from specserve.config import EngineConfig
from specserve.sampling import wire
from specserve.transport.messages import Verdict, Verify
from specserve.verification import judges_of, tree_judges
from specserve.verification.verifier import Verifier

VOCAB = 7
RULES = sorted(name for name in judges_of(EngineConfig()) if name != "synthetic")
OPTIONS = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.1},
    {"presence_penalty": 0.5, "logit_bias": ((1, 2.0),)},
    {"repetition_penalty": 1.3, "bad_words": ((2,),), "min_tokens": 9, "end_tokens": (3,)},
    {"allowed_token_ids": (1, 2, 3)},
]
TABLE = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
DIST = torch.softmax(torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)), -1)
ROUND = verify(
    [
        Part(0, 0, [1, 2, 3], [0, 1], chain=[4, 5, 6], dist_rows=[0, 1, 2]),
        Part(1, 0, [1, 2, 3], [2, 3], chain=[4, 2], dist_rows=[3, 4]),
        Part(2, 0, [1, 2, 3], [4, 5]),
    ],
    wire.encode_sparse(*wire.sparsify(DIST, 4)),
)


class OnDevice(TableBackend):
    """Its logits are elsewhere."""

    device = ELSEWHERE

    def forward(self, batch):
        """See `TableBackend`."""
        return there(super().forward(batch))


def judged(backend: TableBackend, choices: list[dict], message: Verify = ROUND) -> Verdict:
    backend.allocate(64, 4)
    worker = Verifier(backend, vocab_size=VOCAB)
    for row, options in enumerate(choices):
        worker.handle(opened(row, seed=5 + row, tokens=(1, 2, 3), prompt_length=1, **options))
    (verdict,) = worker.handle(message)
    assert isinstance(verdict, Verdict), verdict
    return verdict


def looked(choices: list[dict], message: Verify = ROUND) -> PretendDevice:
    """What a round of these requests did, which says on the device what it says on the host."""
    expected = judged(TableBackend(TABLE), choices, message)
    with PretendDevice() as device:
        found = judged(OnDevice(TABLE), choices, message)
    assert (found.kept.tolist(), found.next.tolist()) == (expected.kept.tolist(), expected.next.tolist())
    assert found.scores.logprobs.tolist() == pytest.approx(expected.scores.logprobs.tolist(), abs=1e-5)
    assert found.scores.top_ids.tolist() == expected.scores.top_ids.tolist()
    return device


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_round_is_read_once(rule: str, options: dict) -> None:
    """Under every rule and option, with chains of three lengths; nothing on the way there waits."""
    device = looked([options | {"rule": rule}] * 3)
    assert sum(device.looks.values()) == 1
    assert not device.waits
    assert device.sent > 3 or options == {"temperature": 0.0}  # the host follows the choices that it reads


def test_a_round_of_many_kinds_is_read_once() -> None:
    """Three rules, one of them greedy, are judged apart and told together."""
    device = looked([{"rule": "rejection"}, {"rule": "block", "top_p": 0.7}, {"rule": "coupled", "temperature": 0.0}])
    assert sum(device.looks.values()) == 1
    assert not device.waits


def test_log_probabilities_take_a_second_look() -> None:
    """Which tokens are scored is known only when the round was read."""
    device = looked([{"logprobs": 2}] * 3)
    assert sum(device.looks.values()) == 2
    assert not device.waits


@pytest.mark.parametrize("rule", sorted(tree_judges()))
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.8}], ids=str)
def test_trees_are_judged_on_a_device_as_on_the_host(rule: str, options: dict) -> None:
    """Two siblings and a child of one; nothing waits on its way there."""
    message = replace(ROUND, parents=np.array([-1, -1, 0, -1, -1], dtype=np.int32))
    assert not looked([options | {"rule": rule}] * 3, message).waits
