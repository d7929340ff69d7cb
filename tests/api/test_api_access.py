"""Keys, limits at the door, CORS: who may ask, and how much at once."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from scripted_engine import ScriptedEngine, app_of, call, chat, complete, said

from specserve.config import parse
from specserve.errors import ConfigError

ONE, TWO, ADMIN = "client-key-one", "client-key-two", "admin-key-0000"
KEYS = {"api_keys": [ONE, TWO], "admin_key": ADMIN}
SHAPE = {"message", "type", "param", "code"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/load", "/metrics", "/nowhere", "/v1/models/tiny"])
@pytest.mark.parametrize("headers", [{}, bearer("client-key-on"), bearer(""), {"authorization": f"Basic {ONE}"}])
def test_without_a_known_key_everything_is_closed(path, headers) -> None:
    """401 in OpenAI's shape, unknown paths too, so that nothing can be told from the outside."""
    response = call(app_of(ScriptedEngine(), **KEYS), "GET", path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert set(error) == SHAPE
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


def test_a_refused_body_is_not_even_read() -> None:
    """Neither the engine nor the validation sees a request without a key."""
    engine = ScriptedEngine(said("x"))
    app = app_of(engine, **KEYS)
    assert chat(app, temperature=99).status_code == 401
    assert call(app, "POST", "/tokenize", json={"prompt": "hi"}).status_code == 401
    assert engine.requests == []


@pytest.mark.parametrize("key", [ONE, TWO, ADMIN])
def test_each_key_opens_the_api(key) -> None:
    """Every client's key, and the admin's; the scheme in any case."""
    app = app_of(ScriptedEngine(said("x")), **KEYS)
    assert call(app, "GET", "/v1/models", headers=bearer(key)).status_code == 200
    assert call(app, "GET", "/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200


def test_operators_paths_need_the_admin_key() -> None:
    """A client's key is known there but may not: 403; without an admin key any key will do."""
    app = app_of(ScriptedEngine(), **KEYS)
    for path in ("/metrics", "/load"):
        refused = call(app, "GET", path, headers=bearer(ONE))
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert call(app, "GET", path, headers=bearer(ADMIN)).status_code == 200
        assert call(app_of(ScriptedEngine(), api_keys=[ONE]), "GET", path, headers=bearer(ONE)).status_code == 200
    only_admin = app_of(ScriptedEngine(), admin_key=ADMIN)
    assert call(only_admin, "GET", "/metrics").status_code == 401
    assert call(only_admin, "GET", "/v1/models").status_code == 200


@pytest.mark.parametrize(("fields", "status"), [({}, 401), ({"open_metrics": True}, 200)])
def test_health_is_open_and_metrics_can_be(fields, status) -> None:
    """Probes have no keys; scrapers may go without by configuration."""
    app = app_of(ScriptedEngine(), **KEYS, **fields)
    assert call(app, "GET", "/health").status_code == call(app, "GET", "/ready").status_code == 200
    assert call(app, "GET", "/metrics").status_code == status


def test_keys_never_show(caplog: pytest.LogCaptureFixture) -> None:
    """Not in the configuration's text, not in errors, not in the log."""
    config = parse({"server": KEYS})
    response = call(app_of(ScriptedEngine(), **KEYS), "GET", "/v1/models", headers=bearer("wrong-key-sent"))
    for key in (ONE, TWO, ADMIN, "wrong-key-sent"):
        assert key not in repr(config) + config.model_dump_json() + response.text + caplog.text
    assert parse(config.model_dump()) == config


@pytest.mark.parametrize("bad", [{"api_keys": ["short"]}, {"admin_key": "né" * 8}, {"cors_origins": ["example.org"]}])
def test_unusable_keys_and_origins_are_refused_at_start(bad) -> None:
    """Without echoing a key."""
    with pytest.raises(ConfigError) as refused:
        parse({"server": bad})
    assert "short" not in str(refused.value).replace("at least", "")


def test_pages_of_listed_origins_may_call() -> None:
    """Preflights need no key, errors carry the headers too, credentials are never allowed, others get nothing."""
    app = app_of(ScriptedEngine(), cors_origins=["https://a.example"], **KEYS)
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    preflight = call(app, "OPTIONS", "/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-credentials" not in preflight.headers
    refused = call(app, "GET", "/v1/models", headers={"origin": "https://a.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
    for other in (app, app_of(ScriptedEngine())):
        found = call(other, "GET", "/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in found.headers


def test_headers_over_the_limit_are_431() -> None:
    """In OpenAI's shape, before anything else is looked at."""
    app = app_of(ScriptedEngine(), max_header_bytes=1000)
    assert call(app, "GET", "/v1/models", headers={"x-a": "b" * 500}).status_code == 200
    response = call(app, "GET", "/v1/models", headers={"x-a": "b" * 1000})
    assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")


def held(app, keys: list[str | None], release_after: int) -> list[httpx.Response]:
    """Requests that start one after the other and wait in the engine until so many have arrived."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            tasks = []
            for index, key in enumerate(keys):
                headers = {} if key is None else bearer(key)
                post = client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
                tasks.append(asyncio.create_task(post))
                await asyncio.sleep(0.05)
                if index + 1 == release_after:
                    GATE.set()
            return await asyncio.gather(*tasks)

    return asyncio.run(run())


class Gate:
    """Lets engine streams wait until it is set, in whichever loop runs."""

    def __init__(self) -> None:
        self._open = False

    def set(self) -> None:
        self._open = True

    async def __call__(self) -> None:
        while not self._open:
            await asyncio.sleep(0.005)


GATE = Gate()


@pytest.fixture(autouse=True)
def closed_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_api_access.GATE", Gate())


def waiting_engine() -> ScriptedEngine:
    return ScriptedEngine(lambda _: [GATE, *said("x")])


def test_a_full_house_is_429_and_places_come_back() -> None:
    """The third of two places is refused with a time to come back; when those end there is room again."""
    engine = waiting_engine()
    app = app_of(engine, max_inflight=2)
    responses = held(app, [None] * 3, release_after=3)
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert responses[2].headers["retry-after"] == "1"
    assert responses[2].json()["error"]["type"] == "rate_limit_error"
    assert len(engine.requests) == 2
    assert complete(app).status_code == 200


def test_one_key_cannot_take_all_places() -> None:
    """The key with two requests is told to wait; the other key is served meanwhile."""
    app = app_of(waiting_engine(), api_keys=[ONE, TWO], max_inflight_per_key=2)
    responses = held(app, [ONE, ONE, ONE, TWO], release_after=4)
    assert [response.status_code for response in responses] == [200, 200, 429, 200]
    assert responses[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert complete(app, model=None).status_code == 401


def test_refused_and_failed_requests_give_their_places_back() -> None:
    """Bad bodies and engine failures hold nothing afterwards."""
    app = app_of(ScriptedEngine([RuntimeError("bug")]), max_inflight=1)
    for _ in range(3):
        assert complete(app, temperature=9).status_code == 400
        assert complete(app).status_code == 500
        assert complete(app, stream=True).status_code == 500


def test_get_requests_are_no_load() -> None:
    """Probes and scrapes are answered in a full house."""
    app = app_of(ScriptedEngine(lambda _: [GATE, *said("x")]), max_inflight=1)

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi"}))
            await asyncio.sleep(0.05)
            codes = [(await client.get(path)).status_code for path in ("/health", "/metrics", "/load")]
            GATE.set()
            return [*codes, (await task).status_code]

    assert asyncio.run(run()) == [200, 200, 200, 200]


def test_the_engine_is_told_whose_key_it_is_and_not_the_key() -> None:
    """By number, from 1; requests without a client's key are all one client."""
    engine = ScriptedEngine(said("x"))
    app = app_of(engine, **KEYS)
    for key in (ONE, TWO, ADMIN):
        assert call(app, "POST", "/v1/completions", json={"prompt": "hi"}, headers=bearer(key)).status_code == 200
    assert [request.client for request in engine.requests] == [1, 2, 0]
    open_to_all = ScriptedEngine(said("x"))
    assert complete(app_of(open_to_all), n=2).status_code == 200
    assert [request.client for request in open_to_all.requests] == [0, 0]
