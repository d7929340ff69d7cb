"""Whatever a client sends: 4xx in OpenAI's shape, bounded, and the engine never hears of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from scripted_engine import ScriptedEngine, app_of, call, said

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
GOOD = {"chat": {"messages": [{"role": "user", "content": "hi"}]}, "completions": {"prompt": "hi"}}

RAW_BODIES = {
    "empty": b"",
    "not_json": b"hello",
    "truncated": b'{"prompt": "hi"',
    "array": b"[]",
    "string": b'"hi"',
    "null": b"null",
    "not_utf8": b'{"prompt": "\xff"}',
    "utf16": '{"prompt": "hi"}'.encode("utf-16"),
    "byte_order_mark": b"\xef\xbb\xbf{}",
    "deep_list": b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    "deeper_list": b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep_unknown": b'{"x": ' + b'{"x": ' * 100 + b"1" + b"}" * 101,
    "control_character": b'{"prompt": "a\nb"}',
    "huge_number": b'{"max_tokens": ' + b"9" * 5000 + b"}",
    "trailing": b"{} {}",
}

ANY_VALUES: dict[str, list[str]] = {
    "temperature": ["NaN", "Infinity", "-Infinity", "1e999", "-0.1", "2.1", '"1"', "true", "[]"],
    "top_p": ["NaN", "0", "1.1", "-1", '"x"'],
    "top_k": ["-2", "1.5", "true", "36893488147419103232"],
    "max_tokens": ["0", "-1", "1.5", '"5"', "true", "257", "36893488147419103232", "1e999"],
    "seed": ["9223372036854775808", "-9223372036854775809", "36893488147419103232", "0.5", '"1"'],
    "stop": ['""', "[1]", "{}", '["a","b","c","d","e"]', '["a",""]', "1", '"' + "x" * 257 + '"', '["\\u0000"]'],
    "stop_token_ids": ["[-1]", "[421]", '["a"]', "5", "[true]", "[1.5]", str([1] * 65)],
    "stream": ['"yes"', "1", "[]"],
    "stream_options": ['{"include_usage": true}', "1"],
    "ignore_eos": ["1", '"true"'],
    "model": ['"other"', "1", '"a\\u0000b"', '"\\ud800"'],
    "user": ['"\\ud800"', '"a\\u0000"', "[NaN]"],
    "speculation": [
        '{"rule": "magic"}',
        '{"source": "oracle"}',
        '{"source": 1}',
        '{"depth": 9}',
        '{"depth": -1}',
        '{"depth": "2"}',
        '{"k": 2}',
        "true",
        '{"enabled": 1}',
    ],
    "n": ["129", "0", "-1", '"1"', "true", "1.5", "36893488147419103232"],
    "best_of": ["2"],
    "suffix": ['"x"'],
    "request_id": ['""', '"a b"', "1", '"' + "x" * 65 + '"'],
    "include_stop_str_in_output": ["1"],
    "return_token_ids": ["1"],
    "functions": ["[{}]"],
    "response_format": ['"text"', "{}", '{"type": "xml"}', '{"type": "text", "x": 1}', '{"type": "json_schema"}'],
    "logit_bias": ['{"421": 1}', '{"-1": 1}', '{"a": 1}', '{"5.0": 1}', '{"": 1}', '{"5": "1"}', "[5]", '{"٥": 1}'],
    "frequency_penalty": ["2.1", "-2.1", "NaN", "true", '"1"'],
    "presence_penalty": ["2.1", "-2.1", "1e999", "[]"],
    "repetition_penalty": ["0", "1e-320", "0.009", "-1", "101", "true", "NaN"],
    "min_p": ["-0.1", "1.1", "true", "NaN"],
    "min_tokens": ["-1", "1.5", "true", "257"],
    "bad_words": ['""', '[""]', '[" "]', "[1]", '["' + "x" * 257 + '"]', str(["a"] * 65).replace("'", '"')],
    "allowed_token_ids": ["[]", "[421]", "[-1]", '["a"]', "[true]", "5"],
    "prediction": [
        '"x"',
        "[]",
        '{"content": "x"}',
        '{"type": "text", "content": "x"}',
        '{"type": "content"}',
        '{"type": "content", "content": ""}',
        '{"type": "content", "content": 5}',
        '{"type": "content", "content": [{"type": "image_url"}]}',
        '{"type": "content", "content": "' + "é" * 400 + '"}',
        '{"type": "content", "content": "x"}, "n": 2',
    ],
    "guided_json": ["{}"],
    "structured_outputs": [
        '{"lark": "a"}',
        "{}",
        "[]",
        '{"regex": 1}',
        '{"regex": "a", "choice": ["b"]}',
        '{"choice": []}',
    ],
    "modalities": ['["audio"]'],
    "chat_template": ['"x"'],
}

CHAT_VALUES: dict[str, list[str]] = {
    "logprobs": ["1", '"true"', "0"],
    "top_logprobs": ["3", "-1", "21", "true"],
    "echo": ["true"],
    "tools": [
        '[{"type": "function", "function": {"name": "f"}}]',
        "[]",
        "{}",
        "[1]",
        '[{"type": "function"}]',
        '[{"type": "function", "function": {"name": "no spaces"}}]',
        '[{"type": "function", "function": {"name": "f", "parameters": []}}]',
    ],
    "tool_choice": ['"required"', '"sometimes"', "{}", '{"type": "function", "function": {"name": "f"}}', "1"],
    "parallel_tool_calls": ["1"],
    "chat_template_kwargs": ["[]", '{"messages": []}', '{"eos_token": "x"}', '{"a b": 1}'],
    "reasoning_effort": ["1"],
}

COMPLETION_VALUES: dict[str, list[str]] = {
    "logprobs": ["true", "-1", "21", "1.5"],
    "top_logprobs": ["3"],
    "echo": ["1", '"true"'],
    "tools": ["[]", '[{"type": "function", "function": {"name": "f"}}]'],
    "tool_choice": ['"required"'],
    "reasoning_effort": ['"low"'],
}

PROMPTS = {
    "missing": None,
    "null": "null",
    "empty_text": '""',
    "empty_list": "[]",
    "empty_inside": '["a", ""]',
    "empty_ids": "[[]]",
    "mixed": '["a", 1]',
    "mixed_lists": '["a", [1]]',
    "number": "5",
    "object": "{}",
    "bool": "[true]",
    "float": "[1.0]",
    "negative": "[-1]",
    "beyond_vocabulary": "[421]",
    "65_bit": "[36893488147419103232]",
    "surrogate": '"\\udc00 x"',
    "nul": '"a\\u0000"',
    "too_long": json.dumps([5] * 256),
    "too_many": json.dumps(["a"] * 1025),
    "nested": "[[[1]]]",
}

MESSAGES = {
    "missing": None,
    "null": "null",
    "empty": "[]",
    "text": '"hi"',
    "no_role": '[{"content": "a"}]',
    "wrong_role": '[{"role": "king", "content": "a"}]',
    "number_role": '[{"role": 1, "content": "a"}]',
    "no_content": '[{"role": "user"}]',
    "number_content": '[{"role": "user", "content": 5}]',
    "empty_parts": '[{"role": "user", "content": []}]',
    "image": '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
    "typeless_part": '[{"role": "user", "content": [{"text": "x"}]}]',
    "textless_part": '[{"role": "user", "content": [{"type": "text"}]}]',
    "string_part": '[{"role": "user", "content": ["x"]}]',
    "tool_calls": '[{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}]',
    "surrogate": '[{"role": "user", "content": "\\ud83d"}]',
    "template_refuses": '[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]',
    "too_long": json.dumps([{"role": "user", "content": "é" * 400}]),
    "not_objects": "[1]",
}


def with_field(endpoint: str, field: str, value: str | None) -> bytes:
    """A good body with one field replaced by raw JSON, or left out."""
    items = {name: json.dumps(good) for name, good in GOOD[endpoint].items()}
    items.pop(field, None)
    if value is not None:
        items[field] = value
    return ("{" + ",".join(f'"{name}": {text}' for name, text in items.items()) + "}").encode()


def cases() -> Iterator[tuple[str, str, bytes]]:
    for endpoint in PATHS:
        for name, body in RAW_BODIES.items():
            yield f"{endpoint}-{name}", endpoint, body
        for field, values in ANY_VALUES.items():
            for value in values:
                yield f"{endpoint}-{field}-{value[:24]}", endpoint, with_field(endpoint, field, value)
    for endpoint, only in (("chat", CHAT_VALUES), ("completions", COMPLETION_VALUES)):
        for field, values in only.items():
            for value in values:
                yield f"{endpoint}-only-{field}-{value}", endpoint, with_field(endpoint, field, value)
    for name, value in PROMPTS.items():
        yield f"prompt-{name}", "completions", with_field("completions", "prompt", value)
    for name, value in MESSAGES.items():
        yield f"messages-{name}", "chat", with_field("chat", "messages", value)
    for value in ("0", "257", '"1"'):
        yield f"max_completion_tokens-{value}", "chat", with_field("chat", "max_completion_tokens", value)


CASES = list(cases())


def assert_refused(response: object, status: int = 400) -> dict[str, object]:
    """The answer has the status and exactly OpenAI's error shape, and is small."""
    assert response.status_code == status, response.text  # type: ignore[attr-defined]
    assert len(response.content) <= 4096  # type: ignore[attr-defined]
    body = response.json()  # type: ignore[attr-defined]
    assert set(body) == {"error"}
    error: dict[str, object] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["message"], str)
    assert isinstance(error["code"], str)
    return error


@pytest.mark.parametrize(("endpoint", "body"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_input_is_refused(endpoint: str, body: bytes, stream: bool) -> None:
    """400 (404 for a wrong model), for streams as for whole answers; the engine is untouched."""
    if stream:
        if not body.startswith(b'{"') or b'"stream' in body:
            return
        body = b'{"stream": true, ' + body[1:]
    engine = ScriptedEngine(said("x"))
    headers = {"content-type": "application/json"}
    response = call(app_of(engine), "POST", PATHS[endpoint], content=body, headers=headers)
    assert_refused(response, 404 if response.status_code == 404 and b'"other"' in body else 400)
    assert engine.requests == []


@pytest.mark.parametrize("endpoint", PATHS)
def test_the_good_bodies_are_good(endpoint: str) -> None:
    """The bodies that the bad ones are made from are served, so each refusal has the reason it claims."""
    assert call(app_of(ScriptedEngine(said("x"))), "POST", PATHS[endpoint], json=GOOD[endpoint]).status_code == 200


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_another_content_type_is_415(endpoint: str, content_type: str | None) -> None:
    """Only application/json is read; a charset parameter does no harm."""
    app, body = app_of(ScriptedEngine(said("x"))), json.dumps(GOOD[endpoint]).encode()
    headers = {} if content_type is None else {"content-type": content_type}
    assert_refused(call(app, "POST", PATHS[endpoint], content=body, headers=headers), 415)
    fine = {"content-type": "Application/JSON; charset=utf-8"}
    assert call(app, "POST", PATHS[endpoint], content=body, headers=fine).status_code == 200


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_413(endpoint: str, announced: bool) -> None:
    """By its announced length, and by what arrives when none was announced."""

    async def chunks() -> object:
        for _ in range(40):
            yield b" " * 100

    engine = ScriptedEngine(said("x"))
    content = b" " * 4000 if announced else chunks()
    headers = {"content-type": "application/json"}
    app = app_of(engine, max_body_bytes=2048)
    error = assert_refused(call(app, "POST", PATHS[endpoint], content=content, headers=headers), 413)
    assert error["code"] == "body_too_large"
    assert engine.requests == []


@pytest.mark.parametrize("field", ["best_of", "echo", "tools", "suffix"])
def test_an_unsupported_field_is_named(field: str) -> None:
    """What would change the answer is refused by name, never ignored."""
    body = with_field("chat", field, (ANY_VALUES | CHAT_VALUES)[field][0])
    headers = {"content-type": "application/json"}
    error = assert_refused(call(app_of(ScriptedEngine()), "POST", PATHS["chat"], content=body, headers=headers))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert field in str(error["message"])


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("chat", {"n": 129}, "n"),
        ("chat", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"min_tokens": 17}, "min_tokens"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"best_of": 3, "n": 2}, "best_of"),
        ("completions", {"prompt": ["a"] * 145, "n": 2}, "prompt"),
        ("completions", {"bad_words": [" "]}, "bad_words"),
        ("completions", {"allowed_token_ids": [421]}, "allowed_token_ids"),
    ],
)
def test_a_wrong_option_is_named(endpoint: str, fields: dict[str, object], param: str) -> None:
    """Each 400 says which field is at fault."""
    error = assert_refused(call(app_of(ScriptedEngine()), "POST", PATHS[endpoint], json=GOOD[endpoint] | fields))
    assert error["param"] == param


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("completions", {"prompt": [5] * 256}, "prompt"),
        ("chat", {"messages": [{"role": "user", "content": "q!" * 150}]}, "messages"),
        ("completions", {"max_tokens": 257}, "max_tokens"),
        ("chat", {"max_completion_tokens": 2**70}, "max_tokens"),
    ],
)
def test_too_much_for_the_context_says_how_long_it_is(endpoint: str, fields: dict[str, object], param: str) -> None:
    """Prompt alone or max_tokens alone over the context: the wording that clients classify by."""
    error = assert_refused(call(app_of(ScriptedEngine()), "POST", PATHS[endpoint], json=GOOD[endpoint] | fields))
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "This model's maximum context length is 256 tokens" in str(error["message"])


@pytest.mark.parametrize("endpoint", PATHS)
def test_errors_do_not_echo_what_was_sent(endpoint: str) -> None:
    """A large wrong value comes back neither in full nor in part."""
    for field in ("stop", "temperature", "stop_token_ids", "prompt", "messages", "model"):
        body = GOOD[endpoint] | {field: {"SECRET" * 1000: ["SECRET" * 1000]}}
        response = call(app_of(ScriptedEngine(said("x"))), "POST", PATHS[endpoint], json=body)
        if response.status_code != 200:  # the other endpoint's field is unknown here, and so ignored
            assert_refused(response)
            assert "SECRET" not in response.text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"speculation": {"foo": 1}}, "speculation.foo: there is no such field"),
        ({"messages": []}, "messages: must not be empty"),
    ],
)
def test_a_refusal_says_what_is_wrong_in_words_of_its_own(fields: dict[str, object], told: str) -> None:
    """Not in those of the library that validates."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | fields
    reply = call(app_of(ScriptedEngine(said("x"))), "POST", "/v1/chat/completions", json=body)
    assert assert_refused(reply)["message"] == told


@pytest.mark.parametrize("field", ["speculation", "stream_options"])
@pytest.mark.parametrize("value", [False, 3, "on", ["enabled"]])
def test_what_must_be_an_object_is_refused_in_words_of_json(field: str, value: object) -> None:
    """And not in those of the language that the server is written in."""
    body = {**GOOD["chat"], "stream": True, field: value}
    error = assert_refused(call(app_of(ScriptedEngine(said("x"))), "POST", PATHS["chat"], json=body), 400)
    assert (error["param"], error["message"]) == (field, f"{field}: must be an object")
