"""When there are spans and when there are none, where they go, and what they say of requests that go wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine, app_of, call, said

from specserve import config as configs
from specserve.config import TracingConfig
from specserve.errors import ConfigError, Overloaded
from specserve.tracing import tracer_of
from specserve.types import Delta, Failure, RequestId

pytest.importorskip("opentelemetry.sdk", reason="needs the extra specserve[tracing]")

TESTS = Path(__file__).parents[1]
BODY = {"prompt": "hello", "max_tokens": 4}
TRACE, PARENT = "ab" * 16, "cd" * 8


def settings(tmp_path: Path, **tracing: object) -> dict[str, object]:
    return {"exporter": "file", "path": str(tmp_path / "spans.jsonl")} | tracing


def spans(app, tmp_path: Path) -> list[dict]:
    """What is in the file once the application has ended."""
    app.state.tracer.close()
    return [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text(encoding="utf-8").splitlines()]


def span_of(engine: ScriptedEngine, tmp_path: Path, body: dict[str, object] = BODY, **headers: str) -> dict:
    """The one span of one request."""
    app = app_of(engine, settings(tmp_path))
    call(app, "POST", "/v1/completions", json=body, headers=headers)
    (span,) = spans(app, tmp_path)
    return span


def test_without_tracing_nothing_of_it_is_there():
    """Off by default: no tracer, no layer around the routes or the engine, and the SDK not loaded."""
    code = f"""
import sys
sys.path[:0] = {[str(TESTS), str(TESTS / "api")]!r}
from scripted_engine import ScriptedEngine, app_of, call, said
engine = ScriptedEngine(said("yes"))
app = app_of(engine)
assert app.state.tracer is None
assert "Traced" not in {{layer.cls.__name__ for layer in app.user_middleware}}
headers = {{"traceparent": "00-{TRACE}-{PARENT}-01"}}
assert call(app, "POST", "/v1/completions", json={BODY!r}, headers=headers).status_code == 200
assert engine.requests[0].trace is None
assert not {{"specserve.tracing.opentelemetry", "opentelemetry.sdk.trace"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_traceparent_is_honoured(tmp_path):
    """Its trace and its span; the engine is told of the span here, and of the same trace."""
    engine = ScriptedEngine(said("yes"))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=7"}
    span = span_of(engine, tmp_path, **headers)
    assert (span["context"]["trace_id"], span["parent_id"]) == (f"0x{TRACE}", f"0x{PARENT}")
    assert span["context"]["trace_state"] == "['{key=vendor, value=7}']"
    assert engine.requests[0].trace == f"00-{TRACE}-{span['context']['span_id'][2:]}-01"


@pytest.mark.parametrize("header", ["nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", "é" * 55])
def test_a_damaged_traceparent_begins_a_new_trace(tmp_path, header):
    """And harms nobody."""
    app = app_of(ScriptedEngine(said("yes")), settings(tmp_path))
    answer = call(app, "POST", "/v1/completions", json=BODY, headers={"traceparent": header.encode()})
    (span,) = spans(app, tmp_path)
    assert answer.status_code == 200
    assert span["parent_id"] is None
    assert span["context"]["trace_id"] != f"0x{TRACE}"


def test_only_requests_for_text_have_spans(tmp_path):
    """Health, models and metrics are asked all the time."""
    app = app_of(ScriptedEngine(said("yes")), settings(tmp_path))
    for path in ("/health", "/v1/models", "/metrics", "/v1/completions"):
        call(app, "GET", path)
    assert spans(app, tmp_path) == []


def test_a_mistake_of_the_client_is_no_error_of_the_server(tmp_path):
    """The code of what was wrong, its status, and no failed span."""
    span = span_of(ScriptedEngine(said("yes")), tmp_path, BODY | {"temperature": 9})
    assert span["attributes"]["error.type"] == "invalid_value"
    assert span["attributes"]["http.response.status_code"] == 400
    assert span["status"]["status_code"] == "UNSET"


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_or_loses_is_told(tmp_path, stream):
    """A full queue is a 429; a failure amid the answer fails the span, also where the stream had begun with a 200."""
    full = span_of(ScriptedEngine([Overloaded("the queue is full")]), tmp_path, BODY | {"stream": stream})
    assert full["attributes"]["error.type"] == "queue_full"
    assert full["attributes"]["http.response.status_code"] == 429
    assert full["status"]["status_code"] == "UNSET"
    (tmp_path / "spans.jsonl").unlink()
    lost = Delta(RequestId(""), (), finish="error", failure=Failure(503, "verifier_lost", "gone"))
    failed = span_of(ScriptedEngine([*said("one", "two")[:1], lost]), tmp_path, BODY | {"stream": stream})
    assert failed["attributes"]["error.type"] == "verifier_lost"
    assert failed["attributes"]["http.response.status_code"] == (200 if stream else 503)
    assert failed["attributes"]["gen_ai.response.finish_reasons"] == ["error"]
    assert failed["status"]["status_code"] == "ERROR"


def test_an_answer_out_of_time_is_told(tmp_path):
    """Its stream had begun, and no delta says why it ends."""
    slow = [said("one", "two")[0], lambda: asyncio.sleep(5)]
    app = app_of(ScriptedEngine(slow), settings(tmp_path), request_timeout_s=0.2)
    call(app, "POST", "/v1/completions", json=BODY | {"stream": True})
    (span,) = spans(app, tmp_path)
    assert span["attributes"]["error.type"] == "interrupted"
    assert span["status"]["status_code"] == "ERROR"


def test_the_console_gets_a_line_for_each_span(capfd):
    """On the standard error stream, where the log is."""
    app = app_of(ScriptedEngine(said("yes")), {"exporter": "console"})
    call(app, "POST", "/v1/completions", json=BODY)
    app.state.tracer.close()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert json.loads(line)["name"].startswith("text_completion ")


def test_a_file_is_written_behind_what_it_holds(tmp_path):
    """Several processes may share it."""
    (tmp_path / "spans.jsonl").write_text("{}\n", encoding="utf-8")
    app = app_of(ScriptedEngine(said("yes")), settings(tmp_path))
    call(app, "POST", "/v1/completions", json=BODY)
    assert len(spans(app, tmp_path)) == 2


def test_a_share_of_requests_is_traced(tmp_path):
    """None of those that do not say, at 0; those that do say are."""
    app = app_of(ScriptedEngine(said("yes")), settings(tmp_path, share=0))
    call(app, "POST", "/v1/completions", json=BODY)
    call(app, "POST", "/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert [span["context"]["trace_id"] for span in spans(app, tmp_path)] == [f"0x{TRACE}"]


def test_wrong_settings_are_refused_with_what_to_do(tmp_path):
    """An address without a scheme, a file that cannot be, an exporter that nobody knows."""
    for wrong in ({"endpoint": "localhost:4318"}, {"exporter": "jaeger"}, {"share": 2}, {"exporter": "file"}):
        with pytest.raises(ConfigError, match=r"observe\.tracing"):
            configs.parse({"observe": {"tracing": wrong}})
    with pytest.raises(ConfigError, match="cannot write"):
        tracer_of(TracingConfig(**settings(tmp_path, path=str(tmp_path / "no" / "folder"))), "ingress")


def test_missing_packages_are_named(monkeypatch):
    """With the extra that brings them."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install specserve\[tracing\]"):
        tracer_of(TracingConfig(exporter="otlp"), "ingress")
