"""response_format and structured_outputs: what reaches the engine, and what is refused before it does."""

from __future__ import annotations

import json

import pytest
from scripted_engine import ScriptedEngine, app_of, chat, complete, said

from specserve.types import Structured

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}


def as_format(schema: object, **fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | fields}


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    ("fields", "kind", "spec"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": as_format(SCHEMA, strict=True, description="d")}, "json_schema", SCHEMA),
        ({"response_format": as_format(SCHEMA, strict=False)}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["yes", "né"]}}, "choice", ["yes", "né"]),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}, "response_format": {"type": "text"}}, "grammar", None),
    ],
)
def test_the_engine_gets_what_was_asked_for(ask, fields, kind, spec) -> None:
    """In whole answers and in streams, which look as they always do."""
    for stream in (False, True):
        engine = ScriptedEngine(said("x"))
        response = ask(app_of(engine), stream=stream, **fields)
        assert response.status_code == 200, response.text
        (request,) = engine.requests
        assert request.structured.kind == kind
        if spec is not None:
            found = request.structured.spec
            assert (json.loads(found) if isinstance(spec, (dict, list)) else found) == spec


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": None}]
)
def test_nothing_asked_is_nothing_held_to(fields) -> None:
    """Plain text stays plain."""
    engine = ScriptedEngine(said("x"))
    assert chat(app_of(engine), **fields).status_code == 200
    assert engine.requests[0].structured is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
        ({"response_format": as_format(None)}, "response_format.json_schema.schema", "JSON schema"),
        ({"response_format": as_format("{}")}, "response_format.json_schema.schema", "JSON schema"),
        ({"response_format": as_format({}, name="")}, "response_format.json_schema.name", "name"),
        ({"response_format": as_format({}, strict="yes")}, "response_format.json_schema.strict", "strict"),
        ({"response_format": as_format({}, schemas={})}, "response_format.json_schema", "schemas"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "schema"),
        ({"response_format": as_format({"type": "array", "uniqueItems": True})}, "json_schema", "uniqueItems"),
        ({"response_format": as_format({"$ref": "http://127.0.0.1:1/s"})}, "json_schema", "127.0.0.1"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list of texts"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"regex": "(a"}}, "regex", "regex"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "regex", "regex"),
        ({"structured_outputs": {"grammar": "start: x"}}, "grammar", "grammar"),
        ({"structured_outputs": {"json": {"not": {}}}}, "json_schema", "not"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "one",
        ),
        ({"guided_json": {}}, "guided_json", "guided_json"),
        ({"guided_regex": "a"}, "guided_regex", "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice", "guided_choice"),
        ({"guided_grammar": "a"}, "guided_grammar", "guided_grammar"),
    ],
)
def test_what_cannot_be_held_to_is_400_with_the_reason(fields, param, named, stream) -> None:
    """A real status even for streams, the field at fault in `param`; the engine never hears of it."""
    engine = ScriptedEngine(said("x"))
    response = chat(app_of(engine), stream=stream, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert named in error["message"]
    assert engine.requests == []


def test_a_specification_over_the_limit_is_400() -> None:
    """server.max_schema_bytes counts the specification, not the body."""
    fields = {"structured_outputs": {"regex": "a" * 40}}
    assert chat(app_of(ScriptedEngine(said("x")), max_schema_bytes=40), **fields).status_code == 200
    refused = chat(app_of(ScriptedEngine(said("x")), max_schema_bytes=39), **fields)
    assert refused.status_code == 400
    assert "40 bytes, at most 39" in refused.json()["error"]["message"]


def test_several_prompts_share_one_specification() -> None:
    """Each sequence of a completion is held to it."""
    engine = ScriptedEngine(said("x"))
    assert complete(app_of(engine), prompt=["a", "b"], structured_outputs={"regex": "a"}).status_code == 200
    assert [request.structured for request in engine.requests] == [Structured("regex", "a")] * 2
