"""Whatever is refused at the door is counted under the code of its error, once, and nothing else is."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from scripted_engine import NOBODY, ScriptedEngine, app_of, call, chat, complete, said

from specserve.errors import InvalidField, Overloaded
from specserve.types import Delta, Failure

KEYS = {"api_keys": ["client-key-one"], "admin_key": "admin-key-0000"}
KEY = {"authorization": "Bearer client-key-one"}
JSON = {"content-type": "application/json"}
POST = ("POST", "/v1/completions")


def rejections(app) -> dict[str, float]:
    """Counts above zero, by reason."""
    text = app.state.metrics.render()
    found = re.findall(r'^specserve_http_requests_rejected_total\{reason="(\w+)"\} (\S+)', text, re.MULTILINE)
    assert len(found) > 15
    return {reason: float(count) for reason, count in found if float(count)}


@pytest.mark.parametrize(
    ("asked", "options", "server", "status", "reason"),
    [
        (POST, {"content": b"{not json", "headers": JSON}, {}, 400, "invalid_request"),
        (POST, {"json": {"prompt": 5}}, {}, 400, "invalid_value"),
        (POST, {"json": {"prompt": "x" * 400}}, {}, 400, "context_length_exceeded"),
        (POST, {"json": {"prompt": "hi", "use_beam_search": True}}, {}, 400, "unsupported_parameter"),
        (POST, {"json": {"prompt": "hi", "model": "another"}}, {}, 404, "model_not_found"),
        (POST, {"content": b"hi", "headers": {"content-type": "text/plain"}}, {}, 415, "unsupported_media_type"),
        (POST, {"json": {"prompt": "x" * 3000}}, {"max_body_bytes": 1024}, 413, "body_too_large"),
        (POST, {"json": {}, "headers": {"x": "y" * 600}}, {"max_header_bytes": 512}, 431, "headers_too_large"),
        (POST, {"json": {"prompt": "hi"}}, KEYS, 401, "invalid_api_key"),
        (("GET", "/metrics"), {"headers": KEY}, KEYS, 403, "permission_denied"),
        (("GET", "/nowhere"), {}, {}, 404, "route_not_found"),
        (("DELETE", "/v1/models"), {}, {}, 405, "method_not_allowed"),
    ],
)  # fmt: skip
def test_each_way_of_being_refused_has_its_reason(asked, options, server, status, reason) -> None:
    """One answer, one count, under the code that the client reads; the engine is not asked."""
    engine = ScriptedEngine(said("x"))
    app = app_of(engine, **server)
    response = call(app, *asked, **options)
    assert (response.status_code, response.json()["error"]["code"]) == (status, reason)
    assert rejections(app) == {reason: 1}
    assert engine.requests == []


@pytest.mark.parametrize(
    ("limit", "reason"), [("max_inflight", "queue_full"), ("max_inflight_per_key", "rate_limit_exceeded")]
)
def test_limits_at_the_door_have_theirs(limit, reason) -> None:
    """A full server, and a key with too many requests: the one that has a place is answered."""
    gate = asyncio.Event()
    app = app_of(ScriptedEngine([gate.wait, *said("x")]), api_keys=KEYS["api_keys"], **{limit: 1})

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=KEY) as client:
            first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi"}))
            await asyncio.sleep(0.05)
            second = await client.post("/v1/completions", json={"prompt": "hi"})
            gate.set()
            return [(await first).status_code, second.status_code]

    assert asyncio.run(ask()) == [200, 429]
    assert rejections(app) == {reason: 1}


def test_what_the_engine_refuses_is_counted_too() -> None:
    """Clients see no difference, and so the count is theirs; streamed or not."""
    app = app_of(ScriptedEngine([Overloaded("full")]))
    assert complete(app).status_code == complete(app, stream=True).status_code == 429
    assert rejections(app) == {"queue_full": 2}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("raised", [False, True])
def test_the_field_that_the_engine_refuses_is_named(raised, streamed) -> None:
    """Raised by an engine of this process, or told in a delta by one of another."""
    refused = InvalidField("token ids in bad_words must be in [0, 421)", param="bad_words")
    told = Delta(NOBODY, (), finish="error", failure=Failure.of(refused))
    response = complete(app_of(ScriptedEngine([refused if raised else told])), stream=streamed)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", "bad_words")


def test_answers_and_failures_are_no_rejections() -> None:
    """A good answer, a failure of the server's own, and a stream that breaks after it began."""
    for engine, streamed in (
        (ScriptedEngine(said("yes")), False),
        (ScriptedEngine([RuntimeError("bug")]), False),
        (ScriptedEngine([said("ye", "s")[0], Overloaded("late")]), True),
    ):
        app = app_of(engine)
        chat(app, stream=streamed)
        assert rejections(app) == {}
