"""Fields beside the ordinary ones, the tokenizer's endpoints, and the limits on each of them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import httpx
import pytest
from scripted_engine import CARD, TOKENIZER, ScriptedEngine, app_of, call, chat, complete, events_of, said, stats

from specserve.api.body import parse_object
from specserve.types import Sampling


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, special=False)


def regex(pattern: str) -> dict[str, object]:
    return {"structured_outputs": {"regex": pattern}}


USUAL = Sampling(temperature=0.3, top_p=0.8, top_k=5, min_p=0.1, repetition_penalty=1.2)


@pytest.mark.parametrize("ask", [chat, complete])
def test_what_a_request_leaves_out_is_as_the_model_has_it(ask) -> None:
    """Each setting on its own; one that is given counts, also where it switches a filter off."""
    engine = ScriptedEngine(said("x"), card=replace(CARD, sampling=USUAL))
    app = app_of(engine)
    for given in ({}, {"temperature": 0}, {"top_p": 1}, {"top_k": 0}, {"min_p": 0}, {"repetition_penalty": 1}):
        assert ask(app, **given).status_code == 200
        assert engine.requests[-1].sampling == replace(USUAL, **given)


def test_the_api_s_own_defaults_can_be_had() -> None:
    """Whatever the model's makers would have."""
    engine = ScriptedEngine(said("x"), card=replace(CARD, sampling=USUAL))
    assert complete(app_of(engine, sampling_defaults="openai"), top_p=0.5).status_code == 200
    assert engine.requests[-1].sampling == Sampling(top_p=0.5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_can_be_kept(stream) -> None:
    """With include_stop_str_in_output the answer ends behind the stop text, not before it."""
    engine = ScriptedEngine(said("one E", "ND", stop_reason="END"))
    response = complete(app_of(engine), stop="END", include_stop_str_in_output=True, stream=stream)
    choices = [each["choices"][0] for each in events_of(response)[:-1]] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "one END"


@pytest.mark.parametrize("ask", [chat, complete])
def test_token_ids_come_back(ask) -> None:
    """The tokens of prompt and answer, whole and streamed, those that show nothing too."""
    engine = ScriptedEngine(said("Größe ", "😀"))
    (choice,) = ask(app_of(engine), return_token_ids=True).json()["choices"]
    assert choice["token_ids"] == ids("Größe ") + ids("😀")
    assert choice["prompt_token_ids"] == list(engine.requests[0].prompt)
    chunks = events_of(ask(app_of(engine), return_token_ids=True, stream=True))[:-1]
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert streamed == choice["token_ids"]
    assert "token_ids" not in ask(app_of(engine)).json()["choices"][0]


def test_a_request_id_in_the_body_comes_back_in_the_header() -> None:
    """Also with an error behind it."""
    app = app_of(ScriptedEngine(said("x")))
    assert complete(app, request_id="my-7").headers["x-request-id"] == "my-7"
    refused = complete(app, request_id="my-8", prompt=[421])
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "my-8")


def test_unknown_fields_are_ignored_unless_that_is_forbidden() -> None:
    """strict_params turns an unknown field into a 400 that names it."""
    assert complete(app_of(ScriptedEngine(said("x"))), frobnicate=1).status_code == 200
    refused = complete(app_of(ScriptedEngine(said("x")), strict_params=True), frobnicate=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "frobnicate")
    assert "unknown field frobnicate;" in refused.json()["error"]["message"]
    assert complete(app_of(ScriptedEngine(said("x")), strict_params=True), user="u").status_code == 200


@pytest.mark.parametrize(("size", "apart"), [(100, False), (200_000, True)])
def test_a_large_body_is_read_beside_the_loop(monkeypatch, size, apart) -> None:
    """Reading megabytes takes a large part of a second, in which no open stream of the process would go on."""
    threads = []

    def noted(raw: bytes) -> dict[str, object]:
        threads.append(threading.current_thread() is not threading.main_thread())
        return parse_object(raw)

    monkeypatch.setattr("specserve.api.app.parse_object", noted)
    app = app_of(ScriptedEngine(said("x")))
    assert complete(app, user="u" * size).status_code == 200
    refused = complete(app, prompt=5, user="u" * size)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert threads == [apart] * 2


@pytest.mark.parametrize(
    ("limit", "ask", "fine", "over"),
    [
        ({"max_n": 2}, chat, {"n": 2}, {"n": 3}),
        ({"max_prompts": 2}, complete, {"prompt": ["a", "b"]}, {"prompt": ["a", "b", "c"]}),
        ({"max_logprobs": 3}, complete, {"logprobs": 3}, {"logprobs": 4}),
        ({"max_logprobs": 3}, chat, {"logprobs": True, "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 4}),
        ({"max_stop_strings": 1}, complete, {"stop": ["a"]}, {"stop": ["a", "b"]}),
        ({"max_stop_length": 2}, complete, {"stop": "ab"}, {"stop": "abc"}),
        ({"max_schema_bytes": 5}, complete, regex("a{1}"), regex("a{1,2}")),
    ],
)
def test_each_limit_is_configurable_and_holds(limit, ask, fine, over) -> None:
    """What is just allowed is served, one more is a 400."""
    app = app_of(ScriptedEngine(lambda _: said("x")), **limit)
    assert ask(app, **fine).status_code == 200
    assert ask(app, **over).status_code == 400


def test_a_body_that_does_not_arrive_is_408() -> None:
    """After body_timeout_s, with a hint that trying again is of no use."""

    async def slowly() -> object:
        yield b'{"prompt": '
        await asyncio.sleep(5)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app_of(ScriptedEngine(), body_timeout_s=0.05))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"content-type": "application/json"}
            return await client.post("/v1/completions", content=slowly(), headers=headers)

    response = asyncio.run(run())
    assert (response.status_code, response.json()["error"]["type"]) == (408, "timeout_error")
    assert response.headers["x-should-retry"] == "false"


def test_tokenize_counts_and_spells() -> None:
    """Text with its tokens one by one; what a tokenizer adds can be left out."""
    app = app_of(ScriptedEngine())
    body = call(app, "POST", "/tokenize", json={"prompt": "Größe 😀", "return_token_strs": True}).json()
    assert body["tokens"] == ids("Größe 😀")
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), CARD.context_length)
    assert len(body["token_strs"]) == body["count"]
    assert call(app, "POST", "/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_tokenize_agrees_with_the_chat_endpoint() -> None:
    """The tokens of messages are the prompt that the engine gets for them."""
    engine = ScriptedEngine(said("x"))
    messages = [{"role": "user", "content": "hi"}]
    chat(app_of(engine), messages=messages)
    body = call(app_of(engine), "POST", "/tokenize", json={"messages": messages, "model": "tiny"}).json()
    assert tuple(body["tokens"]) == engine.requests[0].prompt


def test_detokenize_is_the_way_back() -> None:
    """Special tokens are spelt out; both names that clients read hold the text."""
    app = app_of(ScriptedEngine())
    body = call(app, "POST", "/detokenize", json={"tokens": [1, *ids("Größe 😀"), 2]}).json()
    assert body["prompt"] == body["text"] == "<|start|>Größe 😀<|end|>"
    assert call(app, "POST", "/detokenize", json={"tokens": []}).json()["text"] == ""


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [421]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [2**70]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404),
    ],
)
def test_the_tokenizer_refuses_what_is_malformed(path, body, status) -> None:
    """In OpenAI's shape, as everywhere."""
    response = call(app_of(ScriptedEngine()), "POST", path, json=body)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_load_counts_what_runs_and_waits() -> None:
    """For balancers: one number, and its parts."""
    body = call(app_of(ScriptedEngine()), "GET", "/load").json()
    assert body == {"server_load": 3, "running": 1, "waiting": 2}


def test_template_variables_reach_the_template() -> None:
    """chat_template_kwargs and reasoning_effort are the template's own; this one ignores them."""
    engine = ScriptedEngine(said("x"))
    assert chat(app_of(engine), chat_template_kwargs={"thinking": False}, reasoning_effort="low").status_code == 200


@pytest.mark.parametrize("ask", [chat, complete])
def test_cached_prompt_tokens_and_salts(ask) -> None:
    """usage says how much of the prompt was cached; cache_salt reaches the engine and is bounded."""
    engine = ScriptedEngine(said("yes", stats_=replace(stats(3), cached_tokens=4)))
    usage = ask(app_of(engine), cache_salt="tenant").json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    assert engine.requests[0].cache_salt == "tenant"
    assert ask(app_of(engine)).status_code == 200
    assert engine.requests[1].cache_salt == ""
    assert ask(app_of(engine), cache_salt="x" * 257).status_code == 400
