"""Facts about streamed answers."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine import TOKENIZER, ScriptedEngine, app_of, chat, complete, events_of, said, usage

from specserve.types import Delta, Failure, RequestId

FAILED = Delta(RequestId(""), (), finish="error", failure=Failure(503, "verifier_lost", "gone"))


def test_a_chat_stream_has_its_chunks_in_order() -> None:
    """Role, one chunk per delta, the finish, [DONE]; one id and time throughout."""
    response = chat(app_of(ScriptedEngine(said("Hel", "lo ", "you"))), stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": text} for text in ("Hel", "lo ", "you")), {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 3
    assert not any("metrics" in chunk or "usage" in chunk for chunk in chunks[:-1])


def test_a_completion_stream_carries_text() -> None:
    """Chunks of completions hold text and start without a role."""
    *chunks, done = events_of(complete(app_of(ScriptedEngine(said("a", "b", finish="length"))), stream=True))
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_usage_comes_in_a_chunk_without_choices() -> None:
    """include_usage adds one last chunk with usage and numbers; the others carry null."""
    engine = ScriptedEngine(said("a", "b"))
    *chunks, usage, _ = events_of(chat(app_of(engine), stream=True, stream_options={"include_usage": True}))
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert "speculative_decoding" in usage["metrics"]
    assert all(chunk["usage"] is None and "metrics" not in chunk for chunk in chunks)


def test_continuous_usage_counts_along() -> None:
    """continuous_usage_stats puts the tokens so far on every chunk."""
    options = {"continuous_usage_stats": True, "include_usage": True}
    *chunks, last, _ = events_of(
        complete(app_of(ScriptedEngine(said("a", "b", "c"))), stream=True, stream_options=options)
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert last["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("text", ["日本語 😀👩‍👩‍👧 مرحبا", "plain"])
def test_the_pieces_never_split_a_character(text: str) -> None:
    """Token by token, the pieces are whole characters and together the text."""
    tokens = TOKENIZER.encode(text, special=False)
    script = [Delta(RequestId(""), (token,)) for token in tokens]
    engine = ScriptedEngine([*script, *said("", finish="length")])
    *chunks, _ = events_of(complete(app_of(engine), stream=True))
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stop_text_over_two_deltas_never_shows() -> None:
    """Its beginning is held back until it is decided; then the stream ends before it."""
    engine = ScriptedEngine(said("one E", "ND", stop_reason="END"))
    *chunks, _ = events_of(complete(app_of(engine), stream=True, stop="END"))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["one ", ""]
    assert chunks[-1]["choices"][0]["stop_reason"] == "END"


def test_several_prompts_share_a_stream() -> None:
    """Each choice has its own opening, text and finish; the usage is the sum."""
    engine = ScriptedEngine(said("a", "b"))
    options = {"include_usage": True}
    *chunks, last, _ = events_of(complete(app_of(engine), prompt=[[5], [6]], stream=True, stream_options=options))
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == "ab"
        assert [choice["finish_reason"] for choice in own] == [None, None, "stop"]
    assert last["usage"] == usage(2, 4)
    assert "metrics" not in last


def test_a_failure_in_the_first_delta_is_a_real_status() -> None:
    """Nothing was sent yet, so the client sees the status, not a broken stream."""
    response = chat(app_of(ScriptedEngine([FAILED])), stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "verifier_lost")


@pytest.mark.parametrize(("step", "code"), [(FAILED, "verifier_lost"), (KeyError("secret"), "internal_error")])
def test_a_failure_in_a_stream_is_an_event(
    step: Delta | Exception, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first token an error event and [DONE] end the stream."""
    response = chat(app_of(ScriptedEngine([*said("a", "b")[:1], step])), stream=True)
    assert response.status_code == 200
    *_, error, done = events_of(response)
    assert done == "[DONE]"
    assert error["error"]["code"] == code
    assert "secret" not in response.text
    assert ("secret" in caplog.text) is isinstance(step, KeyError)


def test_a_server_that_reports_a_closed_socket_by_an_error_ends_the_stream() -> None:
    """An OSError from sending means that the client left: no error event, and the engine's stream is closed."""

    async def test() -> None:
        engine = ScriptedEngine([*said("a", "b")[:1], *said("c")])
        body = b'{"prompt": "hi", "stream": true}'
        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[object] = []

        async def receive() -> dict[str, object]:
            return incoming.pop() if incoming else await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: dict[str, object]) -> None:
            sent.append(message["type"])
            if message["type"] == "http.response.body":
                raise OSError("closed")

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await app_of(engine)(scope, receive, send)  # type: ignore[arg-type]
        assert sent == ["http.response.start", "http.response.body"]
        assert len(engine.closed) == 1

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_408(stream: bool) -> None:
    """Without a first token in time the status is 408, and the engine's stream is closed."""
    engine = ScriptedEngine([lambda: asyncio.sleep(60), *said("late")])
    response = complete(app_of(engine, request_timeout_s=0.05), stream=stream)
    assert response.status_code == 408
    assert response.json()["error"]["type"] == "timeout_error"
    assert len(engine.closed) == 1


def test_a_stream_that_takes_too_long_ends_in_an_event() -> None:
    """After the first token the deadline ends the stream with an error event."""
    engine = ScriptedEngine([*said("a", "b")[:1], lambda: asyncio.sleep(60)])
    *_, error, done = events_of(complete(app_of(engine, request_timeout_s=0.05), stream=True))
    assert (error["error"]["code"], done) == ("deadline_exceeded", "[DONE]")
    assert len(engine.closed) == 1
