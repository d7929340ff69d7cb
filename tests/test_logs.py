"""Log lines."""

from __future__ import annotations

import io
import json
import logging

import pytest

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
