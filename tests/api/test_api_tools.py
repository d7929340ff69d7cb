"""Tool calling: from tools to grammars, from text to calls, for each way in which templates spell calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import tiny_tokenizer
from fastapi import FastAPI
from scripted_engine import CARD as SMALL
from scripted_engine import ScriptedEngine, call, events_of, said
from templates_with_tools import BARE, LISTED, SPECIAL, SPELT_OTHERWISE, TAGGED

from specserve.api.app import create_app
from specserve.api.tools import CallReader
from specserve.config import Config
from specserve.sampling.grammar import Grammars
from specserve.templates import CallFormat
from specserve.text import Tokenizer

CARD = replace(SMALL, context_length=2048)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]

HEAD, MIDDLE = '{"name": "', '", "arguments": '

ONE = '{"name": "weather", "arguments": {"city": "Köln"}}'
TWO = '{"name": "clock", "arguments": {}}'
TAGGED_ONE = f"<tool_call>\n{ONE}\n</tool_call>"
TAGGED_BOTH = f"{TAGGED_ONE}\n<tool_call>\n{TWO}\n</tool_call>"
BARE_ONE = ONE.replace("arguments", "parameters")


def tokenizer_of(template: str) -> Tokenizer:
    return Tokenizer(
        tiny_tokenizer.byte_level(), end_tokens=frozenset({0, 2}), chat_template=template, special_tokens={}
    )


TOKENIZERS = {template: tokenizer_of(template) for template in (TAGGED, LISTED, BARE, SPELT_OTHERWISE, SPECIAL)}
GRAMMARS = Grammars(TOKENIZERS[TAGGED])


def app_with(engine: ScriptedEngine, template: str = TAGGED, **server: object) -> FastAPI:
    config = Config.model_validate({"model_name": "tiny", "server": server})

    def check(structured: object) -> None:
        GRAMMARS.check(structured, max_bytes=config.server.max_schema_bytes)  # type: ignore[arg-type]

    return create_app(engine, TOKENIZERS[template], config, check_structured=check)


def ask(app: FastAPI, **fields: object):
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | fields
    return call(app, "POST", "/v1/chat/completions", json=body)


def asked(template: str = TAGGED, **fields: object) -> ScriptedEngine:
    engine = ScriptedEngine(said("x"), CARD)
    response = ask(app_with(engine, template), **fields)
    assert response.status_code == 200, response.text
    return engine


def takes(engine: ScriptedEngine, text: str) -> bool:
    """Whether the grammar of the engine's request allows this whole answer."""
    matcher = GRAMMARS.matcher(engine.requests[0].structured)
    tokens = TOKENIZERS[TAGGED].encode(text, special=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TAGGED, CallFormat("<tool_call>\n", HEAD, MIDDLE, "}", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")),
        (LISTED, CallFormat("CALLS [", HEAD, MIDDLE, "}", ", ", "]")),
        (BARE, CallFormat("", HEAD, '", "parameters": ', "}", None, "")),
        (SPELT_OTHERWISE, None),
        (SPECIAL, None),
        (tiny_tokenizer.TEMPLATE, None),
    ],
)
def test_the_form_of_calls_is_read_off_the_template(template, expected) -> None:
    """Tags, a list, or the bare object; None where it cannot be told, or is not plain text."""
    assert tokenizer_of(template).call_format == expected


def test_the_template_shows_the_tools_unless_none_may_be_called() -> None:
    """They stand in the prompt as they were sent; with tool_choice none neither they nor a grammar are there."""
    shown = asked().requests[0]
    text = TOKENIZERS[TAGGED].decode(shown.prompt, skip_special=False)
    assert '"name": "weather"' in text
    assert shown.structured is not None
    for fields in ({"tool_choice": "none"}, {"tools": None}, {"tools": None, "tool_choice": "auto"}):
        hidden = asked(**fields).requests[0]
        assert "weather" not in TOKENIZERS[TAGGED].decode(hidden.prompt, skip_special=False)
        assert hidden.structured is None


AUTO = [
    ("", True),
    ("Just text with { and <tool_cal", True),
    (TAGGED_ONE, True),
    (TAGGED_BOTH, True),
    (f"Let me see.\n{TAGGED_ONE}", True),
    (f"{TAGGED_ONE} and more", False),
    ("<tool_call>\nnonsense", False),
    (TAGGED_ONE.replace("weather", "feather"), False),
    (TAGGED_ONE.replace("Köln", "Köln").replace("city", "town"), False),
    (TAGGED_ONE.replace("</tool_call>", ""), False),
]


@pytest.mark.parametrize(("text", "allowed"), AUTO)
def test_auto_allows_text_or_whole_calls(text, allowed) -> None:
    """A call that begins must become one of a tool that is there, with arguments of its schema."""
    assert takes(asked(), text) is allowed


@pytest.mark.parametrize(
    ("fields", "one", "both", "other", "text"),
    [
        ({"tool_choice": "required"}, True, True, True, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True, False, True, False),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, False, False, True, False),
        ({"parallel_tool_calls": False}, True, False, True, True),
    ],
)
def test_the_choice_decides_what_may_be_called(fields, one, both, other, text) -> None:
    """Required means a call, a name means that function, parallel_tool_calls false means one call."""
    engine = asked(**fields)
    answers = (TAGGED_ONE, TAGGED_BOTH, f"<tool_call>\n{TWO}\n</tool_call>", "text")
    assert tuple(takes(engine, answer) for answer in answers) == (one, both, other, text)


@pytest.mark.parametrize(
    ("template", "good", "bad"),
    [
        (LISTED, [f"CALLS [{ONE}]", f"So: CALLS [{ONE}, {TWO}]", "no calls"], ["CALLS []", f"CALLS [{ONE}"]),
        (BARE, [BARE_ONE, "a { b"], [f"{BARE_ONE}{BARE_ONE}", '{"name": "x"', ONE]),
    ],
)
def test_other_ways_of_spelling_calls_are_held_to_as_well(template, good, bad) -> None:
    """A list behind a word, and a bare object that no text may look like."""
    engine = asked(template)
    assert [takes(engine, text) for text in good] == [True] * len(good)
    assert [takes(engine, text) for text in bad] == [False] * len(bad)


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def answered(parts: Sequence[str], template: str = TAGGED, finish: str = "stop", **fields: object):
    """The message and finish reason of a whole answer, checked against those of the stream."""
    app = app_with(ScriptedEngine(lambda _: said(*parts, finish=finish), CARD), template)  # type: ignore[arg-type]
    (choice,) = ask(app, **fields).json()["choices"]
    chunks = [each["choices"][0] for each in events_of(ask(app, stream=True, **fields))[:-1]]
    content = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    calls = [each for chunk in chunks for each in chunk["delta"].get("tool_calls", ())]
    assert content == (choice["message"]["content"] or "")
    assert [each["index"] for each in calls] == list(range(len(calls)))
    assert [each["function"] for each in calls] == [
        each["function"] for each in choice["message"].get("tool_calls", ())
    ]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    return choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("template", "text", "content"),
    [
        (TAGGED, TAGGED_BOTH, None),
        (TAGGED, f"Let me < see.\n{TAGGED_BOTH}", "Let me < see.\n"),
        (LISTED, f"CALLS [{ONE}, {TWO}]", None),
        (LISTED, f"CALL CALLS [{ONE}, {TWO}]", "CALL "),
    ],
)
def test_calls_are_read_out_of_the_text(size, template, text, content) -> None:
    """However the text arrives: content before the calls, each call whole with an id of its own."""
    message, finish = answered(pieces(text, size), template)
    assert message["content"] == content
    assert [each["function"] for each in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Köln"}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert len({each["id"] for each in message["tool_calls"]}) == 2
    assert all(each["id"].startswith("call_") and each["type"] == "function" for each in message["tool_calls"])
    assert finish == "tool_calls"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("template", "text"), [(TAGGED, "a <tool_cal"), (TAGGED, "plain"), (BARE, 'a {"name": "'), (LISTED, "CALLS")]
)
def test_text_that_only_looks_like_a_call_is_text(size, template, text) -> None:
    """Held back until it is decided, then shown."""
    message, finish = answered(pieces(text, size), template)
    assert (message["content"], finish) == (text, "stop")
    assert "tool_calls" not in message


@pytest.mark.parametrize("size", [1, 1000])
def test_a_bare_call_is_the_whole_answer(size) -> None:
    """Without a marker the object itself is the call."""
    message, finish = answered(pieces(BARE_ONE, size), BARE)
    assert (message["content"], finish) == (None, "tool_calls")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Köln"}


def test_a_call_that_max_tokens_cuts_is_shown_as_far_as_it_goes() -> None:
    """finish_reason is length, and the arguments are as incomplete as the answer."""
    message, finish = answered(['<tool_call>\n{"name": "weather", "arguments": {"ci'], finish="length")
    assert finish == "length"
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"ci'}


def test_a_brace_inside_an_argument_does_not_end_the_call() -> None:
    """Arguments are read as JSON, not by counting."""
    arguments = '{"city": "} \\" \\n{\\"name\\": \\"clock\\", \\"arguments\\": {}}"}'
    reader = CallReader(TOKENIZERS[TAGGED].call_format)
    calls = []
    for part in pieces(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>', 2):
        calls += reader.push(part)[1]
    assert [(made.name, made.arguments) for made in calls] == [("weather", arguments)]


def test_a_conversation_with_calls_and_results_reaches_the_template() -> None:
    """Arguments go to the template as an object; the tool's answer follows."""
    made = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    text = TOKENIZERS[TAGGED].decode(asked(messages=messages, tools=None).requests[0].prompt, skip_special=False)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "K' in text
    assert "<|start|>tool\nrain<|end|>" in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
        ({"tools": [CLOCK] * 3}, "tools"),
        ({"response_format": {"type": "json_object"}}, "tools"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [1]}]}, "messages.0.tool_calls"),
        *[
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": bad}}]}]},
                "messages.0.tool_calls.0.function.arguments",
            )
            for bad in ("[1]", "{", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": "\\u0000"}', {"a": 1})
        ],
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields, param) -> None:
    """400 with the field at fault, and nothing reaches the engine."""
    engine = ScriptedEngine(said("x"), CARD)
    response = ask(app_with(engine, max_tools=2), **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.requests == []


@pytest.mark.parametrize("schema", [{"properties": {"a": {"type": "string", "format": "no-such"}}}, {"x-guidance": 5}])
def test_a_schema_that_cannot_be_enforced_is_refused_or_ours_alone(schema) -> None:
    """Unknown formats are a 400; a client's own x-guidance is overruled."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"} | schema}}
    response = ask(app_with(ScriptedEngine(said("x"), CARD)), tools=[tool])
    assert response.status_code == (200 if "x-guidance" in schema else 400)


@pytest.mark.parametrize("template", [SPELT_OTHERWISE, SPECIAL])
def test_a_model_without_a_known_way_of_calling_is_a_400(template) -> None:
    """Said so, instead of leaving the tools out."""
    response = ask(app_with(ScriptedEngine(said("x"), CARD), template))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_parameter")


def test_tokenize_counts_tools_too() -> None:
    """The count of a conversation with tools is the length of the prompt that the engine gets."""
    engine = asked()
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    found = call(app_with(engine), "POST", "/tokenize", json=body).json()
    assert tuple(found["tokens"]) == engine.requests[0].prompt
