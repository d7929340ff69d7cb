"""Bodies that nobody would think of: zero 5xx, and every refusal in OpenAI's shape and small."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, app_of, call, said
from starlette.types import Message

from specserve.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

KINDS = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}

ODD = [
    *(0, 1, -1, 2**31, 2**63, -(2**63) - 1, 2**70, 10**400, 0.5, -0.0, 1e308, True, False, None),
    *("", "\x00", "\ud800", "é" * 300, "x" * 5000, "NaN", "0", "content", "function", "auto", "required"),
    *([], {}, [[]], [None], [{}], {"type": None}, {"type": "function"}, {"type": "content", "content": []}),
]
KEYS = st.sampled_from(
    [
        "type",
        "function",
        "name",
        "content",
        "text",
        "json_schema",
        "schema",
        "role",
        "enabled",
        "depth",
        "rule",
        "source",
    ]
) | st.text(max_size=8)
VALUES = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def app() -> Any:
    return app_of(ScriptedEngine(lambda _: said("x")))


def check(response: httpx.Response) -> None:
    """Served, or refused as it should be."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert len(response.content) <= 4096
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A good body with one to three of its endpoint's fields replaced."""
    path = draw(st.sampled_from(sorted(KINDS)))
    fields = st.sampled_from(sorted(KINDS[path].model_fields)) | st.text(max_size=8)
    changes = draw(st.dictionaries(fields, VALUES, min_size=1, max_size=3))
    return path, json.dumps(GOOD[path] | changes).encode()


COMMON = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def sent(path: str, body: bytes) -> httpx.Response:
    return call(app(), "POST", path, content=body, headers={"content-type": "application/json"})


@settings(max_examples=150, **COMMON)
@example(("/v1/completions", json.dumps({"prompt": "x" * 100_000}).encode()))
@example(("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"1": 1e999}}'))
@given(bodies())
def test_odd_values_in_any_field_are_served_or_refused(body: tuple[str, bytes]) -> None:
    """A sample of what `test_many_odd_values` tries."""
    check(sent(*body))


@pytest.mark.full
@settings(max_examples=4000, **COMMON)
@given(bodies())
def test_many_odd_values(body: tuple[str, bytes]) -> None:
    """Thousands of bodies, one to three odd fields each."""
    check(sent(*body))


@settings(max_examples=100, **COMMON)
@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode()))
def test_any_bytes_are_refused(path: str, content: bytes) -> None:
    """Whatever is no JSON object of the right kind is a 4xx."""
    response = sent(path, content)
    check(response)
    assert response.status_code >= 400


@pytest.mark.parametrize("path", sorted(KINDS))
@pytest.mark.parametrize("size", [3_900_000, 10_000_000])
def test_megabytes_of_text_are_refused_at_once(path: str, size: int) -> None:
    """Within the body's limit by the context's length, beyond it by size; no answer repeats them."""
    field = {"/v1/chat/completions": "messages", "/detokenize": "tokens"}.get(path, "prompt")
    text = "a" * size
    body = {"messages": [{"role": "user", "content": text}]} if field == "messages" else {field: text}
    response = sent(path, json.dumps(body).encode())
    check(response)
    assert response.status_code == (413 if size > 4 * 2**20 else 400)


@pytest.mark.parametrize("cut", [0, 1, 10])
def test_a_client_that_leaves_in_its_body_is_no_error(cut: int) -> None:
    """The answer to nobody is logged as 499 and counted; the engine never hears of it."""
    engine = ScriptedEngine(said("x"))
    served = app_of(engine)
    parts: list[Message] = [{"type": "http.request", "body": b'{"prompt": "hi"}'[:cut], "more_body": True}]
    sent_back: list[Message] = []

    async def receive() -> Message:
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent_back.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"16")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    asyncio.run(served(scope | {"raw_path": b"", "root_path": "", "scheme": "http"}, receive, send))
    assert sent_back == []
    assert engine.requests == []
    assert 'code="499"' in call(served, "GET", "/metrics").text


def test_the_document_describes_every_route() -> None:
    """OpenAPI 3.1, all references resolved, every route of the app in it and nothing else."""
    served = app()
    found = call(served, "GET", "/openapi.json").json()
    routes = {
        (route.path.replace(":path}", "}"), method.lower()) for route in served.routes for method in route.methods
    }
    assert {(path, method) for path, item in found["paths"].items() for method in item} == routes
    names = set(found["components"]["schemas"])
    for reference in json.dumps(found).split('"$ref": "')[1:]:
        assert reference.partition('"')[0].rpartition("/")[2] in names
    assert {"ChatBody", "CompletionBody", "Speculation", "Error"} <= names
