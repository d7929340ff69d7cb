"""Log lines of a process: text for people, or one JSON object a line. Prompts and answers are never logged."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Literal, TextIO

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request that this task works for; every line logged meanwhile carries it."""


class JsonFormatter(logging.Formatter):
    """ts (UTC), level, logger, event, and whatever was passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "ts": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update({name: value for name, value in vars(record).items() if name not in _PLAIN})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """For people; the request's id stands behind the line where there is one."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the exception below it."""
        found = getattr(record, "request_id", None)
        return super().format(record) + (f" [{found}]" if found else "")


def _with_request(record: logging.LogRecord) -> bool:
    """Give a record the id of the request that is being worked for, unless it brings one."""
    current = request_id.get()
    if current is not None and not hasattr(record, "request_id"):
        record.request_id = current
    return True


def configure(form: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Send this process's `specserve` logs to a stream (stderr). Calling it again replaces the earlier choice."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(_with_request)
    logger = logging.getLogger("specserve")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
