"""Log lines."""

from __future__ import annotations

import io
import json
import logging

import pytest
from api.scripted_engine import ScriptedEngine, app_of, call, said

from specserve import logs


@pytest.fixture(autouse=True)
def restore():
    logger = logging.getLogger("specserve")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


def test_a_json_line_holds_the_event_its_extras_and_the_exception():
    """One object a line, whatever is logged."""
    out = io.StringIO()
    logs.configure("json", out)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("specserve.x").exception("it %s", "broke", extra={"request_id": "r1"})
    (line,) = out.getvalue().splitlines()
    found = json.loads(line)

    assert (found["event"], found["level"], found["request_id"], found["logger"]) == (
        "it broke",
        "error",
        "r1",
        "specserve.x",
    )
    assert "two\nlines" in found["exception"]


def test_configuring_twice_does_not_double_lines():
    """The later choice replaces the earlier one."""
    first, second = io.StringIO(), io.StringIO()
    logs.configure("json", first)
    logs.configure("text", second)
    logging.getLogger("specserve").warning("once")

    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


@pytest.mark.parametrize("form", ["json", "text"])
def test_every_line_of_a_request_carries_its_id(form):
    """Lines logged while a request is worked for name it; others do not."""
    out = io.StringIO()
    logs.configure(form, out)
    logger = logging.getLogger("specserve.x")
    logger.warning("before")
    token = logs.request_id.set("req-1")
    logger.warning("during")
    logs.request_id.reset(token)
    before, during = out.getvalue().splitlines()
    assert "req-1" not in before
    assert during.endswith(" [req-1]") if form == "text" else json.loads(during)["request_id"] == "req-1"


def test_each_answer_is_a_line_with_the_clients_id_and_no_words_of_its_own():
    """Route template, status and time; what is asked every second is left out, and so is what the client wrote."""
    out = io.StringIO()
    logs.configure("json", out)
    app = app_of(ScriptedEngine(said("yes")))
    call(app, "POST", "/v1/completions", json={"prompt": "SECRET"}, headers={"X-Request-Id": "mine-1"})
    call(app, "GET", "/v1/models/SECRET")
    call(app, "GET", "/health")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["route"], line["status"]) for line in lines] == [
        ("/v1/completions", 200),
        ("/v1/models/{model_id:path}", 404),
    ]
    assert lines[0]["request_id"] == "mine-1"
    assert "SECRET" not in out.getvalue()
