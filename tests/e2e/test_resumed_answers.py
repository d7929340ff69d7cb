"""A request that brings the beginning of its answer goes on exactly where it was: the rest is that of one piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import equal_pair

from specserve.config import parse
from specserve.errors import InvalidField
from specserve.local import LocalEngine
from specserve.types import Request, RequestId, RequestStats, Sampling, Structured

TOKENS = 40
WARM = Sampling(temperature=1.0)
KINDS = {
    "greedy": {},
    "coupled": {"sampling": WARM, "seed": 7, "rule": "coupled"},
    "coupled branch": {"sampling": WARM, "seed": 7, "rule": "coupled", "branch": 2},
    "penalties": {"sampling": Sampling(temperature=0.0, repetition_penalty=1.4, frequency_penalty=1.0)},
    "min_tokens": {"sampling": Sampling(temperature=0.0, min_tokens=20), "ignore_eos": False},
    "logprobs": {"logprobs": 2},
    "plain": {"depth": 0},
    "prediction": {"prediction": tuple(range(60, 90))},
    "structured": {"structured": Structured("regex", "(yes|no|maybe){9}!"), "ignore_eos": False},
    "words": {"sampling": Sampling(temperature=0.0, bad_words=((70, 71),), allowed_token_ids=tuple(range(60, 100)))},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    pair = equal_pair(tmp_path_factory.mktemp("pair"), kv_blocks=200, context_length=256, threads=1)
    with LocalEngine(parse(pair | {"engine": {"depth": 3}})) as running:
        yield running


def request(name: str, **fields: object) -> Request:
    fields = {"sampling": Sampling(temperature=0.0), "ignore_eos": True} | fields
    return Request(RequestId(name), (5, 6, 7, 8), TOKENS, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_is_that_of_one_piece(engine, kind):
    """Wherever it is taken up: tokens, reason, log-probabilities, and how long the answer is in all."""
    whole = request("whole", **KINDS[kind])
    (one,) = engine.complete([whole])
    places = [1, 2, 7, len(one.tokens) - 1]
    parts = [replace(whole, id=RequestId(f"from-{place}"), answer=one.tokens[:place]) for place in places]
    for place, part in zip(places, engine.complete(parts), strict=True):
        assert part.tokens == one.tokens[place:]
        assert part.finish_reason == one.finish_reason
        assert part.stats.generated_tokens == len(one.tokens)
        assert [round(each.logprob, 3) for each in part.logprobs] == [
            round(each.logprob, 3) for each in one.logprobs[place:]
        ]


def test_a_stop_text_over_the_place_is_found(engine):
    """Its beginning was said before, its end comes after."""
    (free,) = engine.complete([request("free")])
    text = engine.tokenizer.decode(free.tokens)
    stop = text[len(text) // 2 : len(text) // 2 + 8]
    stopping = request("stopping", stop=(stop,))
    (one,) = engine.complete([stopping])
    assert one.finish_reason == "stop"
    parts = [
        replace(stopping, id=RequestId(f"from-{place}"), answer=one.tokens[:place])
        for place in range(1, len(one.tokens))
    ]
    for place, part in enumerate(engine.complete(parts), start=1):
        assert (part.tokens, part.finish_reason) == (one.tokens[place:], "stop")


def test_a_sampled_answer_goes_on_with_the_same_beginning(engine):
    """Under `rejection` the rest may differ; it is as long as asked, and other seeds give other rests."""
    warm = request("warm", sampling=WARM, seed=3)
    (one,) = engine.complete([warm])
    rests = [replace(warm, id=RequestId(f"r{seed}"), answer=one.tokens[:10], seed=seed) for seed in range(3, 6)]
    found = [each.tokens for each in engine.complete(rests)]
    assert [len(tokens) for tokens in found] == [TOKENS - 10] * 3
    assert len(set(found)) == 3


@pytest.mark.parametrize("answer", [tuple(range(60, 60 + TOKENS)), (10**6,)])
def test_an_answer_that_could_not_go_on_is_refused(engine, answer):
    """One that is complete already, or that holds what is no token."""
    with pytest.raises(InvalidField):
        engine.complete([request("bad", answer=answer)])


def test_the_books_go_on():
    """What a lost coordinator counted is part of the stats; the wait in its queue is not known."""
    from tiny_tokenizer import byte_level

    from specserve.coordinator.requests import admitted
    from specserve.text import Tokenizer

    asked = replace(request("a"), answer=(60, 61, 62))
    state = admitted(0, asked, "me", Tokenizer(byte_level()), now_s=100.0)
    state.resume(RequestStats(4, 3, 2, 5, 1, (1, 1), 9.0, 0.5, 8.0, 2, 3))
    state.started_s = 101.0
    state.take([63, 64], checked=2, kept=1)
    stats = state.stats(now_s=102.0)
    assert (stats.generated_tokens, stats.rounds, stats.drafted_tokens, stats.kept_tokens) == (5, 3, 7, 2)
    assert stats.histogram == (1, 2)
    assert (stats.queue_s, stats.first_token_s, stats.total_s) == (1.0, 0.5, 10.0)
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (2, 3)
