"""Requests with a source of drafts for themselves, beside requests without one."""

from __future__ import annotations

import re

import pytest
from harness import Pipeline
from toy_workers import reference

from specserve.config import DraftConfig
from specserve.drafting import guessers_of
from specserve.errors import InvalidField

PROMPT = [3, 1, 4, 1, 5]
ANSWER = reference(PROMPT, 31)
GARBAGE = [(token + 1) % 96 for token in ANSWER]


def run(depth=4, draft=True, miss=3, **fields):
    pipeline = Pipeline(depth=depth, draft=draft, miss=miss, end=1000)
    pipeline.submit("a", PROMPT, max_tokens=31, **fields)
    pipeline.settle()
    assert pipeline.idle()
    return pipeline


@pytest.mark.parametrize("prediction", [ANSWER, GARBAGE, [*ANSWER[:7], 5, 5, *ANSWER[9:]], [1], ANSWER[10:]])
@pytest.mark.parametrize("draft", [True, False])
def test_a_prediction_changes_no_answer(prediction, draft):
    """Right, wrong, edited, short or shifted, with a draft worker behind it or none: the target's own text."""
    pipeline = run(draft=draft, prediction=tuple(prediction))
    assert pipeline.tokens("a") == ANSWER


def test_a_right_prediction_fills_whole_rounds():
    """The first token comes with the prompt; then every round keeps 4 and adds one that was predicted as well."""
    stats = run(draft=False, prediction=tuple(ANSWER)).last("a").stats
    assert stats.histogram == (1, 0, 0, 0, 6)
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (30, 0)


@pytest.mark.parametrize("prediction", [(), ANSWER])
def test_predictions_may_be_the_only_drafts_of_a_deployment(prediction):
    """As the speculator that was chosen for all: whoever predicts nothing is decoded plainly."""
    pipeline = Pipeline(depth=4, draft=False, guesser=guessers_of(DraftConfig())["prediction"], end=1000)
    pipeline.submit("a", PROMPT, max_tokens=31, prediction=tuple(prediction))
    pipeline.settle()
    assert pipeline.tokens("a") == ANSWER
    assert (pipeline.last("a").stats.drafted_tokens > 0) == bool(prediction)
    assert pipeline.idle()


def test_a_wrong_prediction_is_counted_as_rejected():
    """What was taken from it was refused; nothing was accepted; most rounds did without it."""
    stats = run(draft=False, prediction=tuple(GARBAGE)).last("a").stats
    assert stats.accepted_prediction_tokens == 0
    assert 0 < stats.rejected_prediction_tokens == stats.drafted_tokens


def test_where_the_prediction_is_silent_the_draft_model_drafts():
    """Of an answer predicted in its middle only, both ends are drafted by the worker, and not booked as predicted."""
    pipeline = run(miss=10**9, prediction=tuple(ANSWER[12:20]))
    stats = pipeline.last("a").stats
    assert pipeline.tokens("a") == ANSWER
    assert stats.kept_tokens >= 20
    assert 0 < stats.accepted_prediction_tokens <= 8
    told = re.findall(
        r"^specserve_spec_decode_source_draft_tokens_total(\{.*\}) (\S+)", pipeline.metrics.render(), re.M
    )
    by = {
        (source, result): sum(float(n) for labels, n in told if f'"{source}"' in labels and f'"{result}"' in labels)
        for source in ("prediction", "other")
        for result in ("offered", "kept")
    }
    assert 0 < by["prediction", "kept"] <= stats.accepted_prediction_tokens
    assert by["other", "kept"] > by["prediction", "kept"]
    assert by["prediction", "kept"] + by["other", "kept"] == stats.kept_tokens
    assert by["prediction", "offered"] + by["other", "offered"] == stats.drafted_tokens


def test_only_the_request_with_a_prediction_has_prediction_tokens():
    """Beside it, one without is drafted for as ever, and both texts are the target's."""
    pipeline = Pipeline(depth=4, miss=3, end=1000)
    pipeline.submit("a", PROMPT, max_tokens=31, prediction=tuple(ANSWER))
    pipeline.submit("b", PROMPT, max_tokens=31)
    pipeline.settle()
    alone = run().last("a").stats
    stats = pipeline.last("b").stats
    assert pipeline.tokens("a") == pipeline.tokens("b") == ANSWER
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (0, 0)
    assert (stats.histogram, stats.drafted_tokens) == (alone.histogram, alone.drafted_tokens)
    assert pipeline.last("a").stats.accepted_prediction_tokens == 30


def test_a_named_source_is_the_only_one():
    """With `ngram` the perfect draft worker is not asked for this request: a text without repeats has no drafts."""
    repeated = [5, 6, 7, 8] * 3
    pipeline = run(miss=10**9, source="ngram")
    assert pipeline.tokens("a") == ANSWER
    assert pipeline.last("a").stats.kept_tokens < 3
    small = run(miss=10**9, source="small_model", prediction=tuple(repeated)).last("a").stats
    assert small.kept_tokens == 24
    assert small.accepted_prediction_tokens == small.rejected_prediction_tokens == 0


def test_a_source_that_cannot_be_had_is_refused():
    """An unknown name, and `prediction` without one, are the request's fault; nothing is kept."""
    pipeline = Pipeline(depth=4, end=1000)
    with pytest.raises(InvalidField, match="ngram, prediction, small_model"):
        pipeline.submit("a", PROMPT, source="oracle")
    with pytest.raises(InvalidField, match="no prediction"):
        pipeline.submit("a", PROMPT, source="prediction")
    assert pipeline.engine.unfinished == 0


@pytest.mark.parametrize("lookup", ["none", "suffix"])
def test_preempted_cancelled_and_lost_workers_leave_the_text_and_nothing_held(lookup):
    """Blocks for one and a half requests, a draft worker killed on the way: each text is still the target's."""
    pipeline = Pipeline(depth=4, blocks=14, context=40, miss=2, end=1000, lookup=lookup)
    for name in "abc":
        pipeline.submit(name, PROMPT, max_tokens=31, prediction=(*ANSWER[:10], 9, *ANSWER[11:]))
    for _ in range(9):
        pipeline.step()
    pipeline.lose("draft")
    pipeline.engine.cancel("c")
    pipeline.settle()
    assert pipeline.tokens("a") == pipeline.tokens("b") == ANSWER
    assert pipeline.idle()
    assert not pipeline.engine._own_drafts._open
    assert not pipeline.engine._own_drafts._guessed
