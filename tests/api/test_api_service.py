"""Facts about the routes that describe the service, and about what surrounds every answer."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine, app_of, call, chat, complete, said

from specserve.errors import Overloaded, PoolError, VerifierLost
from specserve.types import Health


def test_models_lists_the_served_model() -> None:
    """The list holds one model with the fields that clients read."""
    body = call(app_of(ScriptedEngine()), "GET", "/v1/models").json()
    assert body["object"] == "list"
    (model,) = body["data"]
    assert model["id"] == model["root"] == "tiny"
    assert (model["object"], model["created"], model["max_model_len"]) == ("model", 1_700_000_000, 256)


def test_one_model_is_found_by_its_id() -> None:
    """The served id is found; any other, slashes included, is 404 model_not_found."""
    app = app_of(ScriptedEngine())
    assert call(app, "GET", "/v1/models/tiny").json()["id"] == "tiny"
    missing = call(app, "GET", "/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("status", "code"), [("ok", 200), ("degraded", 200), ("starting", 503), ("draining", 503), ("dead", 503)]
)
def test_health_and_ready_follow_the_engine(status: str, code: int) -> None:
    """A deployment that serves without speculation is healthy and says so."""
    engine = ScriptedEngine()
    engine.state = Health(status, detail="why")  # type: ignore[arg-type]
    health, ready = (call(app_of(engine), "GET", path) for path in ("/health", "/ready"))
    assert health.status_code == ready.status_code == code
    assert health.json()["status"] == ready.json()["status"] == status
    assert health.json().get("speculation") == ("off" if status == "degraded" else None)
    assert ready.json()["ready"] is (code == 200)


def test_metrics_holds_engine_and_http_families() -> None:
    """One text with both, in the format that Prometheus reads, each family once."""
    app = app_of(ScriptedEngine(said("yes")))
    chat(app, frobnicate=1)
    response = call(app, "GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(response.text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert {"specserve_ingress_up", "specserve_http_requests", "specserve_http_inflight_requests"} <= set(names)
    values = {(s.name, tuple(sorted(s.labels.values()))): s.value for f in families for s in f.samples}
    assert values["specserve_http_requests_total", ("/v1/chat/completions", "200", "POST")] == 1
    assert values["specserve_unknown_params_total", ("other",)] == 1
    assert values["specserve_http_inflight_requests", ()] == 1
    assert "frobnicate" not in response.text


def test_version_is_told() -> None:
    """/version holds a version."""
    assert call(app_of(ScriptedEngine()), "GET", "/version").json()["version"]


@pytest.mark.parametrize("given", ["abc-1.2_3", None, "x" * 65, "bad id"])
def test_every_answer_carries_a_request_id(given: str | None) -> None:
    """A short plain id of the client comes back; anything else is replaced."""
    headers = {} if given is None else {"X-Request-Id": given}
    for path in ("/health", "/nowhere"):
        echoed = call(app_of(ScriptedEngine()), "GET", path, headers=headers).headers.get_list("x-request-id")
        assert len(echoed) == 1
        assert (echoed[0] == given) is (given == "abc-1.2_3")


@pytest.mark.parametrize("path", ["/nowhere", "/docs", "/v1/models/", "/health/"])
def test_an_unknown_path_is_404_in_openai_shape(path: str) -> None:
    """No redirect, no framework default."""
    response = call(app_of(ScriptedEngine()), "GET", path)
    assert response.status_code == 404
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_wrong_method_is_405_in_openai_shape() -> None:
    """The answer names the methods that are allowed."""
    response = call(app_of(ScriptedEngine()), "GET", "/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry"),
    [
        (Overloaded("the queue is full"), 429, "rate_limit_error", "1"),
        (VerifierLost("the verifier is being replaced"), 503, "service_unavailable", "2"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_refuses_gives_a_real_status(
    error: Exception, status: int, kind: str, retry: str, stream: bool
) -> None:
    """Before the first token the status is real, for streams too, and says when to try again."""
    response = complete(app_of(ScriptedEngine([error])), stream=stream)
    assert response.status_code == status
    assert response.headers["retry-after"] == retry
    assert response.json()["error"]["type"] == kind
    assert response.json()["error"]["message"] == str(error)


@pytest.mark.parametrize("error", [PoolError("slot 7 at /secret/path"), KeyError("/secret/path")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_shows_no_details(error: Exception, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A 500 holds the request id and nothing of the inside; the log holds the rest under that id."""
    response = complete(app_of(ScriptedEngine([error])), stream=stream)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    assert "secret" in caplog.text
    assert response.headers["x-request-id"] in caplog.text
