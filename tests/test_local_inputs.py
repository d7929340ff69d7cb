"""What people ask of a LocalEngine in Python: one prompt or many, and the same refusals as over HTTP."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest
from tiny_models import tiny_llama

import specserve
from specserve.api.app import create_app
from specserve.errors import InvalidField, RequestError
from specserve.local import LocalEngine
from specserve.types import Request, RequestId, Sampling, Structured

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("target"), seed=1)
    target = {"source": str(folder), "device": "cpu", "kv_blocks": 200}
    tree = {"model_name": "tiny", "target": target, "draft": {"speculator": "ngram"}, "engine": {"max_requests": 4}}
    with LocalEngine(tree) as running:
        yield running


def tokens(answers):
    return [answer.tokens for answer in answers]


def posted(engine, path, body):
    """Status and error of one body over HTTP."""
    app = create_app(engine, engine.tokenizer, engine.config, check_structured=engine.check_structured)

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(path, json=body)

    reply = asyncio.run(ask())
    return reply.status_code, reply.json().get("error")


def test_a_lone_prompt_is_a_list_of_one(engine) -> None:
    """A text is not taken apart, nor are the ids of one prompt; arrays are as good as lists."""
    ids = engine.tokenizer.encode("once upon", special=True)
    (text,) = tokens(engine.generate(["once upon"], max_tokens=5))
    for alone in ("once upon", ids, tuple(ids), np.array(ids), [np.array(ids)]):
        assert tokens(engine.generate(alone, max_tokens=5)) == [text]
    assert tokens(engine.generate(["once upon", ids], max_tokens=5)) == [text, text]
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ("", "the prompt is empty"),
        (["a", ""], "prompt 1 is empty"),
        (b"bytes", "must be a text, token ids, or a list of either, found b'bytes'"),
        (5, "must be a text, token ids, or a list of either, found 5"),
        ({"role": "user"}, "must be a text, token ids, or a list of either"),
        (HELLO, r"prompt 0 must be .* conversations go to chat\(\)"),
        ([1, "a"], "prompt 0 must be a text or a list of token ids, found 1"),
        ([[1.5]], r"prompt 0 must be a text or a list of token ids, found \[1.5\]"),
        ([[True]], "prompt 0 must be"),
        ([[]], "no tokens"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_by_its_number(engine, prompts, told) -> None:
    with pytest.raises(InvalidField, match=told) as refused:
        engine.generate(prompts)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": "5"}, {"max_tokens": True}, {"seed": 2**70}, {"seed": 1.5}],
    ids=str,
)
def test_options_are_refused_alike_by_both_doors(engine, options) -> None:
    """In the same words, for a chat and for a prompt; in Python with what was found."""
    status, error = posted(engine, "/v1/chat/completions", {"messages": HELLO} | options)
    assert status == 400
    for ask in (lambda: engine.chat(HELLO, **options), lambda: engine.generate("a", **options)):
        with pytest.raises(InvalidField) as refused:
            ask()
        (found,) = options.values()
        assert refused.value.message == f"{error['message']}, found {found!r}"
        assert refused.value.param == error["param"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "text",
        None,
        {"role": "user", "content": "hi"},
        ["text"],
        [{"content": "hi"}],
        [{"role": "robot", "content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user"}],
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused_alike_by_both_doors(engine, messages) -> None:
    """Of the same field, beginning with the same words; in Python with what was found and an example, if it helps."""
    status, error = posted(engine, "/v1/chat/completions", {"messages": messages})
    assert status == 400
    with pytest.raises(RequestError) as refused:
        engine.chat(messages)
    assert refused.value.message.startswith(error["message"])
    assert refused.value.param == error["param"]


def test_a_text_instead_of_a_conversation_is_answered_with_an_example(engine) -> None:
    with pytest.raises(InvalidField, match=r"must be a list; a conversation is a list such as .*, found 'text'"):
        engine.chat("text")


def test_a_conversation_is_the_same_prompt_by_either_door(engine) -> None:
    """Parts of text, OpenAI's younger name for the system's role, and a tuple of turns."""
    plain = [{"role": "system", "content": "short"}, *HELLO]
    parts = ({"role": "developer", "content": "short"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]})
    assert engine.chat(parts, max_tokens=5).tokens == engine.chat(plain, max_tokens=5).tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", "1"),
        ("top_k", 1.5),
        ("min_tokens", 0.5),
        ("min_tokens", "2"),
        ("frequency_penalty", [1]),
        ("logit_bias", {5: 1.0}),
        ("logit_bias", ((5,),)),
        ("logit_bias", (("5", 1.0),)),
        ("bad_words", "abc"),
        ("bad_words", ("abc",)),
        ("bad_words", ((1.5,),)),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", ("5",)),
    ],
    ids=str,
)
def test_sampling_of_a_wrong_type_is_refused_by_name(engine, name, value) -> None:
    """With what was found; whether it comes through `generate` or as a finished request."""
    sampling = Sampling(**{name: value})
    ready = Request(RequestId("ready"), (5, 6), 4, sampling)
    for ask in (lambda: engine.generate("a", sampling=sampling), lambda: engine.complete([ready])):
        with pytest.raises(InvalidField, match=name) as refused:
            ask()
        assert "found" in refused.value.message
        assert refused.value.param == name


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sampling": {"temperature": 0.7}}, r"sampling: must be a Sampling, as in sampling=Sampling\("),
        ({"structured": "json_object"}, r"structured: must be a Structured, as in structured=Structured\("),
        ({"max_tokens": None}, "max_tokens: must be a whole number, found None"),
        ({"stop": 5}, "stop: must be a text or a list of texts, found 5"),
        ({"stop": [5]}, r"stop must hold texts, found \(5,\)"),
        ({"depth": -1}, "speculation.depth: "),
        ({"depth": "2"}, "speculation.depth: "),
        ({"ignore_eos": "no"}, "ignore_eos: "),
    ],
    ids=str,
)
def test_other_options_of_a_wrong_type_are_refused_too(engine, options, told) -> None:
    with pytest.raises(InvalidField, match=told):
        engine.generate("a", **options)
    assert len(engine.generate("a", max_tokens=2, structured=Structured("regex", "[a-z]{9}"))) == 1


def test_what_is_imported_when_it_is_used_is_seen_before() -> None:
    """By who looks around; what `__all__` promises is there."""
    assert set(specserve.__all__) <= set(dir(specserve))
    assert specserve.LocalEngine is LocalEngine


def test_numbers_of_numpy_are_numbers(engine) -> None:
    """As are no stop texts, and messages that are made on the way."""
    plain = tokens(engine.generate(["once"], max_tokens=4, seed=3, depth=1))
    like = {"max_tokens": np.int64(4), "seed": np.int64(3), "depth": np.int32(1), "ignore_eos": np.bool_(False)}
    assert tokens(engine.generate(["once"], stop=None, **like)) == plain
    assert engine.chat((turn for turn in HELLO), max_tokens=2).tokens == engine.chat(HELLO, max_tokens=2).tokens


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_tokens": 3.5}, "max_tokens"),
        ({"depth": 1.0}, "speculation.depth"),
        ({"seed": "7"}, "seed"),
        ({"logprobs": "a"}, "logprobs"),
        ({"prompt": (1, 2.0)}, "prompt"),
        ({"sampling": Sampling(top_k=2**63)}, "top_k"),
    ],
)
def test_a_request_of_wrong_types_is_refused_and_harms_nobody(engine, wrong, named) -> None:
    """The coordinator would end by a fraction; the engine answers as before."""
    fields = {"prompt": (1, 2), "max_tokens": 2, "sampling": Sampling(temperature=0.0)} | wrong
    with pytest.raises(InvalidField) as refused:
        engine.complete([Request(RequestId("wrong"), **fields)])
    assert refused.value.param == named
    assert engine.generate(["once"], max_tokens=2)[0].tokens
