"""Chains as values, the dists that go with them, and pushes that are not made of chains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from harness import HeldChannel, Pipeline
from hypothesis import given
from hypothesis import strategies as st
from toy_workers import ToyDraft, reference

from specserve.coordinator.batches import CheckedRow, verify_message
from specserve.coordinator.chain import NOTHING, Chain
from specserve.coordinator.requests import RequestState
from specserve.transport.messages import Dists, Push
from specserve.types import Request, RequestId, RowId, Sampling

TOKENS = st.lists(st.integers(0, 2), max_size=5)


@given(tokens=TOKENS, count=st.integers(0, 6), fed=st.integers(0, 5))
def test_the_first_tokens_of_a_chain_are_a_chain(tokens, count, fed):
    """Tokens, slots and dists stay together; what was fed of it stays fed; the whole is left as it was."""
    chain = Chain(tokens, list(range(10, 10 + len(tokens))), min(fed, len(tokens)), Dists.none(), 4)
    first = chain.first(count)

    assert first.tokens == tokens[:count]
    assert first.slots == list(range(10, 10 + len(tokens)))[:count]
    assert first.fed == min(fed, len(tokens), count)
    assert (first.dists, first.row) == (chain.dists, 4)
    assert len(chain) == len(tokens)


@given(tokens=TOKENS, fed=st.integers(0, 5), committed=TOKENS)
def test_only_written_tokens_on_the_committed_path_count_as_fed(tokens, fed, committed):
    """T8 read with I2: counted one by one, up to the first token that differs or was never fed."""
    chain = Chain(tokens, [], min(fed, len(tokens)))
    expected = 0
    while expected < min(chain.fed, len(committed)) and committed[expected] == tokens[expected]:
        expected += 1

    assert chain.fed_along(committed) == expected


def checked(number, chain, temperature=1.0):
    request = Request(RequestId(str(number)), (1, 2, 3), 8, Sampling(temperature))
    state = RequestState(RowId(number), request, "me", 0.0, [1, 2, 3], None)
    return CheckedRow(state, 0, 2, 1, True, 3, chain)


def dists(seed, rows):
    return Dists("sparse", 2, np.random.default_rng(seed).integers(256, size=(rows, 12), dtype=np.uint8))


def test_each_drafted_token_goes_out_with_the_dist_it_was_drawn_from():
    """Chains from two pushes, of a greedy request, of a guesser and of nothing, in one round."""
    one, two = dists(1, 6), dists(2, 4)
    chains = [
        Chain([5, 6], [0, 1], 1, one, 3),
        Chain([5, 6, 7], [2, 3, 4], 2, two, 1),
        NOTHING,
        Chain([8], [5], 0, one, 0),  # greedy: it has no use for its dist
        Chain([9, 9]),
        Chain([4], [6], 0, one, 5),
    ]
    message = verify_message(1, [checked(n, chain, 0.0 if n == 3 else 1.0) for n, chain in enumerate(chains)])

    assert message.chains.tolist() == [5, 6, 5, 6, 7, 8, 9, 9, 4]
    assert message.chain_lengths.tolist() == [2, 3, 0, 1, 2, 1]
    expected = [one.rows[3], one.rows[4], two.rows[1], two.rows[2], two.rows[3], None, None, None, one.rows[5]]
    for place, row in zip(message.dist_rows.tolist(), expected, strict=True):
        assert (place == -1) if row is None else (message.dists.rows[place] == row).all()
    assert len(message.dists.rows) == 6


class Forger(HeldChannel):
    """Changes one push on its way back."""

    change: dict[str, object]

    def deliver(self, engine):
        real = self.worker.handle
        self.worker.handle = lambda message: [
            replace(reply, **self.change) if isinstance(reply, Push) and len(reply.tokens) == 3 else reply
            for reply in real(message)
        ]
        super().deliver(engine)
        self.worker.handle = real


@pytest.mark.parametrize(
    ("change", "trusted"),
    [
        ({}, True),
        ({"parents": np.array([-1, -1, 0], dtype=np.int32)}, False),  # T3: two first children
        ({"parents": np.array([1, -1, 1], dtype=np.int32)}, False),  # a parent after its child
        ({"sampled": np.array([True, False, True])}, False),  # a guess may never be offered
        ({"fed": np.array([True, False, True])}, False),  # written behind a token that is not
        ({"tokens": np.array([1, 2], dtype=np.int32)}, False),
        ({"slots": np.array([1, 2, 3], dtype=np.int32)}, False),
    ],
)
def test_a_push_that_is_not_made_of_chains_costs_the_worker_its_place(change, trusted):
    """What the draft worker sends is checked before any of it is kept; the text is the target's either way."""
    forger = type("Forging", (Forger,), {"change": change})
    pipeline = Pipeline(depth=3, end=1000, make_channel=forger, make_draft=lambda: ToyDraft(miss=10**9))
    pipeline.submit("a", [1, 2, 3], 13)
    pipeline.settle()

    assert pipeline.tokens("a") == reference([1, 2, 3], 13)
    assert (pipeline.engine.health().status == "ok") is trusted
    assert pipeline.idle()
