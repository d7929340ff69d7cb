"""Facts about how long an answer may take, and about clients that read slowly."""

from __future__ import annotations

import asyncio
import json

import pytest
from scripted_engine import ScriptedEngine, app_of, call, chat, complete, events_of, said

from specserve.api import event_stream

LATE = [lambda: asyncio.sleep(60), *said("late")]
HEADER = "X-Request-Timeout"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_ask_for_less_time(stream: bool) -> None:
    """`timeout_s` in the body ends the answer with 408, and the engine's stream is closed."""
    engine = ScriptedEngine(LATE)
    for response in (chat(app_of(engine), timeout_s=0.05, stream=stream), complete(app_of(engine), timeout_s=0.05)):
        assert response.status_code == 408
        assert response.json()["error"]["code"] == "deadline_exceeded"
    assert len(engine.closed) == 2


def test_a_header_may_ask_for_less_time() -> None:
    """For clients whose bodies are fixed; the least of body, header and server counts."""
    engine = ScriptedEngine(LATE)
    body = {"prompt": "hi", "timeout_s": 500}
    response = call(app_of(engine), "POST", "/v1/completions", json=body, headers={HEADER: "0.05"})
    assert response.status_code == 408
    server = call(app_of(engine, request_timeout_s=0.05), "POST", "/v1/completions", json=body, headers={HEADER: "400"})
    assert server.status_code == 408


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e9", "soon", "1" * 50])
def test_a_header_that_is_no_time_is_refused(value: str) -> None:
    """A 400 that names the header."""
    response = call(app_of(ScriptedEngine()), "POST", "/v1/completions", json={"prompt": "hi"}, headers={HEADER: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, HEADER)


@pytest.mark.parametrize("value", [0, -1, "1", True])
def test_a_field_that_is_no_time_is_refused(value: object) -> None:
    """A 400 that names the field."""
    response = complete(app_of(ScriptedEngine()), timeout_s=value)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout_s")


def test_silence_is_filled_with_comments() -> None:
    """Before the first token and between tokens; the events are the same as without."""
    pause = [lambda: asyncio.sleep(0.2)]
    script = [*pause, *said("a", "b")[:1], *pause, *said("c")]
    plain = complete(app_of(ScriptedEngine(script)), stream=True)
    filled = complete(app_of(ScriptedEngine(script), sse_keepalive_s=0.05), stream=True)
    assert ": keep-alive" not in plain.text
    blocks = filled.text.split("\n\n")
    comments = [block == ": keep-alive" for block in blocks]
    assert comments[0]
    assert comments[1 + comments.index(False) :].count(True) >= 1
    rest = "\n\n".join(block for block in blocks if block != ": keep-alive")
    texts = [chunk["choices"][0]["text"] for chunk in events_of(plain)[:-1]]
    assert [part["choices"][0]["text"] for part in map(_data, rest.split("\n\n")[:-2])] == texts
    assert rest.endswith("data: [DONE]\n\n")


def _data(block: str):
    return json.loads(block.removeprefix("data: "))


def test_without_silence_a_failure_is_a_status_and_after_a_comment_an_event() -> None:
    """A comment is the beginning of a 200; what fails at once keeps its own status."""
    at_once = complete(app_of(ScriptedEngine([KeyError("x")]), sse_keepalive_s=5), stream=True)
    assert at_once.status_code == 500
    late = complete(
        app_of(ScriptedEngine([lambda: asyncio.sleep(0.2), KeyError("x")]), sse_keepalive_s=0.05), stream=True
    )
    assert late.status_code == 200
    assert '"code":"internal_error"' in late.text
    assert late.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("keepalive_s", [0, 0.05])
def test_a_client_that_stops_reading_is_given_up_at_the_deadline(
    keepalive_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-open connection takes nothing more: its request is cancelled when its time is up, not held for ever."""
    monkeypatch.setattr(event_stream, "_LAST_WORDS_S", 0.1)

    async def test() -> None:
        engine = ScriptedEngine([*said("a", "b")[:1], *said("c")])
        incoming = [{"type": "http.request", "body": b'{"prompt": "hi", "stream": true, "timeout_s": 0.1}'}]

        async def receive() -> dict[str, object]:
            return incoming.pop() if incoming else await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        async with asyncio.timeout(20):
            await app_of(engine, sse_keepalive_s=keepalive_s)(scope, receive, send)  # type: ignore[arg-type]
        assert len(engine.closed) == 1

    asyncio.run(test())
