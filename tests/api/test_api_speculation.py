"""What a request says about speculation, and what it predicts: to the engine and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_engine import CARD, TOKENIZER, ScriptedEngine, app_of, chat, complete, events_of, said, stats, usage

PREDICTION = {"type": "content", "content": "The quick brown fox"}
NO_SPECULATION = replace(CARD, max_depth=0, sources=())
OWN_SOURCES_ONLY = replace(CARD, speculator="none", sources=("ngram", "prediction"))


@pytest.mark.parametrize("ask", [chat, complete])
def test_every_wish_reaches_the_engine(ask) -> None:
    """Depth, rule and source; what is left out stays the deployment's; off is depth 0."""
    engine = ScriptedEngine(said("x"))
    wishes = [
        ({"depth": 2, "rule": "coupled", "source": "ngram"}, (2, "coupled", "ngram")),
        ({"enabled": True, "rule": "typical"}, (None, "typical", None)),
        ({"enabled": False, "rule": "coupled"}, (0, "coupled", None)),
        ({}, (None, None, None)),
    ]
    for wish, _ in wishes:
        assert ask(app_of(engine), speculation=wish).status_code == 200
    found = [(request.depth, request.rule, request.source) for request in engine.requests]
    assert found == [expected for _, expected in wishes]


@pytest.mark.parametrize(
    ("card", "fields", "param", "told"),
    [
        (CARD, {"speculation": {"depth": 5}}, "speculation.depth", "at most 4"),
        (CARD, {"speculation": {"rule": "magic"}}, "speculation.rule", "coupled, rejection, typical"),
        (CARD, {"speculation": {"source": "oracle"}}, "speculation.source", "ngram, prediction, small_model"),
        (NO_SPECULATION, {"speculation": {"enabled": True}}, "speculation", "does not speculate"),
        (NO_SPECULATION, {"speculation": {"source": "ngram"}}, "speculation", "does not speculate"),
        (NO_SPECULATION, {"prediction": PREDICTION}, "prediction", "does not speculate"),
        (OWN_SOURCES_ONLY, {"speculation": {"enabled": True}}, "speculation.source", "ngram, prediction"),
    ],
)
def test_what_the_deployment_cannot_do_is_refused_in_words(card, fields, param, told) -> None:
    """400 that names the field and says what there is; the engine hears nothing."""
    engine = ScriptedEngine(said("x"), card)
    response = chat(app_of(engine), **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert told in response.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    ("name", "value", "shown"), [("depth", 0, "0"), ("rule", "exact", '"exact"'), ("source", 1, "1")]
)
def test_a_wish_beside_speculation_is_refused_with_its_place(ask, name, value, shown) -> None:
    """It would have no effect, and nobody would hear of it; null asks for nothing."""
    engine = ScriptedEngine(said("x"))
    refused = ask(app_of(engine), **{name: value})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert f'"speculation": {{"{name}": {shown}}}' in refused.json()["error"]["message"]
    assert engine.requests == []
    assert ask(app_of(engine), **{name: None}).status_code == 200


def test_what_asks_for_nothing_is_fine_without_speculation() -> None:
    """Off, or nothing said, is served by a deployment that does not speculate."""
    engine = ScriptedEngine(said("x"), NO_SPECULATION)
    for wish in (None, {}, {"enabled": False}, {"depth": 0}):
        assert chat(app_of(engine), speculation=wish).status_code == 200


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize("content", ["The quick brown fox", [{"type": "text", "text": "The quick brown fox"}]])
def test_a_prediction_reaches_the_engine_as_tokens(ask, content) -> None:
    """As a text or in parts, without the tokens that a tokenizer puts around a prompt."""
    engine = ScriptedEngine(said("x"))
    assert ask(app_of(engine), prediction={"type": "content", "content": content}).status_code == 200
    assert engine.requests[0].prediction == tuple(TOKENIZER.encode("The quick brown fox", special=False))
    assert engine.requests[0].source is None


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        (chat, {"n": 2}),
        (complete, {"prompt": ["a", "b"]}),
    ],
)
def test_a_prediction_goes_with_one_plain_answer_only(ask, fields) -> None:
    """Not with several answers or several prompts."""
    response = ask(app_of(ScriptedEngine(said("x"))), prediction=PREDICTION, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prediction")


def test_usage_tells_what_became_of_the_prediction() -> None:
    """Accepted and rejected tokens stand beside completion_tokens, which counts sent tokens only; in streams too."""
    numbers = replace(stats(7), accepted_prediction_tokens=5, rejected_prediction_tokens=3)
    engine = ScriptedEngine(said("abc", stats_=numbers))
    body = chat(app_of(engine), prediction=PREDICTION).json()
    sent = len(TOKENIZER.encode("abc", special=False))
    assert body["usage"] == usage(len(engine.requests[0].prompt), sent, 5, 3)
    streamed = chat(app_of(engine), prediction=PREDICTION, stream=True, stream_options={"include_usage": True})
    assert events_of(streamed)[-2]["usage"] == body["usage"]


def test_the_answer_names_rule_and_source_and_whether_it_is_lossless() -> None:
    """A lossy rule is labelled where its numbers stand."""
    engine = ScriptedEngine(said("x"))
    for wish, expected in [
        ({"rule": "typical", "source": "ngram"}, ("typical", False, "ngram")),
        ({}, ("rejection", True, "small_model")),
    ]:
        found = chat(app_of(engine), speculation=wish).json()["metrics"]["speculative_decoding"]
        assert (found["rule"], found["lossless"], found["source"]) == expected
    predicted = chat(app_of(engine), prediction=PREDICTION).json()["metrics"]["speculative_decoding"]
    assert predicted["source"] == "prediction"
