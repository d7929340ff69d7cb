"""Rows that the verifier cannot continue: fed again from what it covers, and nobody else notices."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Pipeline
from toy_workers import reference

from specserve.transport import Arrived
from specserve.transport.messages import Cannot, Verify

PROMPTS = {f"r{i}": [(11 * i + j) % 90 for j in range(5 + 4 * i)] for i in range(3)}


def running(depth: int, tokens: int = 6, **fields) -> Pipeline:
    """Three requests that have each made `tokens` tokens or more."""
    pipeline = Pipeline(depth=depth, end=1000, **fields)
    for name, prompt in PROMPTS.items():
        pipeline.submit(name, prompt, max_tokens=30)
    while min(len(pipeline.tokens(name)) for name in PROMPTS) < tokens:
        assert pipeline.step()
    return pipeline


def fed(pipeline: Pipeline) -> list[Verify]:
    """Every round that is sent from now on."""
    seen: list[Verify] = []
    handle = pipeline.verifier.worker.handle

    def watched(message):
        if isinstance(message, Verify):
            seen.append(message)
        return handle(message)

    pipeline.verifier.worker.handle = watched
    return seen


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("left", [0, 3])
def test_a_row_whose_state_is_gone_is_fed_again_from_what_is_left(depth, left):
    """`covered` or 0 is where the feed begins, in chunks; text, pools and the other rows are as if nothing was."""
    pipeline = running(depth)
    rounds = fed(pipeline)
    row = pipeline.engine._states["r1"].row
    pipeline.verifier.worker.lost = {row: left}
    pipeline.settle()

    starts = [int(m.starts[i]) for m in rounds for i, found in enumerate(m.rows.tolist()) if found == row]
    assert starts[1:3] == [left, left + 8]
    assert all(pipeline.tokens(name) == reference(prompt, 30) for name, prompt in PROMPTS.items())
    assert 'specserve_refills_total{model_name="toy"} 1.0' in pipeline.metrics.render()
    assert pipeline.idle()


def test_the_others_of_the_batch_are_sent_again_with_the_chains_that_they_had():
    """What was drafted for a round that was not computed is not thrown away, nor drafted a second time."""
    pipeline = running(4)
    rounds = fed(pipeline)
    state = pipeline.engine._states["r1"]
    pipeline.verifier.worker.lost = {state.row: 0}
    while len(rounds) < 2:
        pipeline.step()

    first, second = (dict(zip(m.rows.tolist(), chains(m), strict=True)) for m in rounds)
    others = [row for row in first if row != state.row]
    assert len(others) == 2
    assert all(first[row] and second[row] == first[row] for row in others)
    assert second[state.row] == []
    pipeline.settle()
    assert pipeline.idle()


def chains(message: Verify) -> list[list[int]]:
    return [part.tolist() for part in np.split(message.chains, np.cumsum(message.chain_lengths)[:-1])]


def test_all_rows_may_be_lost_at_once_and_again_while_they_are_refilled():
    """A verifier that forgets everything, twice: each request still ends with its own text."""
    pipeline = running(4)
    for _ in range(2):
        pipeline.verifier.worker.lost = {state.row: 0 for state in pipeline.engine._states.values()}
        for _ in range(5):
            pipeline.step()
    pipeline.settle()
    assert all(pipeline.tokens(name) == reference(prompt, 30) for name, prompt in PROMPTS.items())
    assert pipeline.idle()


def test_a_request_that_is_cancelled_before_the_answer_stays_cancelled():
    """`Cannot` for a row whose client is gone changes nothing but the others' plan."""
    pipeline = running(0)
    pipeline.engine.advance()
    pipeline.verifier.worker.lost = {pipeline.engine._states["r1"].row: 0}
    pipeline.engine.cancel("r1")
    pipeline.settle()
    assert pipeline.last("r1").finish == "abort"
    assert pipeline.tokens("r0") == reference(PROMPTS["r0"], 30)
    assert pipeline.idle()


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 99},
        {"rows": np.array([77])},
        {"rows": np.array([], dtype=np.int64), "epochs": ints(), "covered": ints()},
        {"epochs": ints(5)},
        {"covered": ints(-1)},
        {"covered": ints(10_000)},
        {"covered": ints(0, 0)},
    ],
)
def test_an_impossible_cannot_costs_the_verifier_its_place(change):
    """Another round, unknown rows, none at all, or no progress: the worker is treated as lost, nobody waits for it."""
    pipeline = running(0)
    pipeline.engine.advance()
    current = pipeline.engine._round
    row = pipeline.engine._states["r0"].row
    fields = {"batch": current.number, "rows": np.array([row]), "epochs": ints(0), "covered": ints(0)} | change
    pipeline.engine.receive(Arrived("target", 0, Cannot(**fields)))

    assert pipeline.engine.health().status == "starting"
    pipeline.restart("target")
    pipeline.settle()
    assert all(pipeline.tokens(name) == reference(prompt, 30) for name, prompt in PROMPTS.items())
