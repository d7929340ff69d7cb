"""One way from any exception to OpenAI's error shape: {"error": {"message", "type", "param", "code"}}, at most 4 kB."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from specserve.api.schemas import field_error
from specserve.errors import (
    MethodNotAllowed,
    NotAuthenticated,
    Overloaded,
    RequestError,
    RouteNotFound,
    SpecserveError,
    Unavailable,
)
from specserve.types import Delta, Failure

log = logging.getLogger(__name__)

# Characters; JSON may spell each with six bytes, and both together stay under 4 kB.
_MAX_MESSAGE = 500
_MAX_PARAM = 100

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}

_NO_RETRY = (408, 500)
"""Clients of OpenAI try these again by themselves, and here that would only cost the same time once more."""


class EngineFailure(SpecserveError):
    """A failure that the engine reported in a delta."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, param=failure.param)
        self.status = failure.status
        self.code = failure.code


class ClientGone(Exception):
    """The client closed its connection, and nobody reads an answer any more; `stage` is how far it was."""

    def __init__(self, stage: Literal["body", "waiting", "answer"]) -> None:
        super().__init__(stage)
        self.stage = stage


def failure_of(delta: Delta) -> SpecserveError | None:
    """The error that a delta ends its request with, if it does."""
    if delta.failure is not None:
        return EngineFailure(delta.failure)
    if delta.finish == "abort":
        return Unavailable("the request was aborted by the server; try again")
    if delta.finish == "error":
        return SpecserveError("the engine ended the request in an unnamed error")
    return None


def as_specserve(error: Exception) -> SpecserveError:
    """Any exception in the words of `specserve.errors`; what nobody raised on purpose becomes a plain 500."""
    if isinstance(error, SpecserveError):
        return error
    if isinstance(error, ValidationError):
        return field_error(error)
    if isinstance(error, RequestValidationError):
        return RequestError("the request is not valid")
    if isinstance(error, HTTPException):
        return _http_error(error)
    unforeseen = SpecserveError(f"{type(error).__name__}: {error}")
    unforeseen.__cause__ = error  # for the log
    return unforeseen


def error_body(error: SpecserveError, request_id: str) -> dict[str, Any]:
    """OpenAI's error object. The details of an internal error stay in the log, under the request id."""
    message = error.message
    if error.status == 500:
        log.error("request %s failed: %s", request_id, error.message, exc_info=error)
        message = f"internal error; the server's log has the details under request id {request_id}"
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    param = None if error.param is None else _bounded(error.param, _MAX_PARAM)
    return {"error": {"message": _bounded(message, _MAX_MESSAGE), "type": kind, "param": param, "code": error.code}}


def error_response(error: Exception, request_id: str) -> Response:
    """The HTTP answer for any exception."""
    known = as_specserve(error)
    headers = {}
    if isinstance(known, (Overloaded, Unavailable)):
        headers["Retry-After"] = str(math.ceil(known.retry_after_s))
        headers["Retry-After-Ms"] = str(round(1000 * known.retry_after_s))  # clients of OpenAI take this one first
    elif known.status in _NO_RETRY:
        headers["X-Should-Retry"] = "false"
    if isinstance(known, NotAuthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return JSONResponse(error_body(known, request_id), known.status, headers)


def _http_error(error: HTTPException) -> SpecserveError:
    if error.status_code == 404:
        return RouteNotFound("there is no such path")
    if error.status_code == 405:
        return MethodNotAllowed("this path does not take that method")
    if error.status_code < 500:
        return RequestError(str(error.detail))
    return SpecserveError(str(error.detail))


def _bounded(text: str, limit: int) -> str:
    # A lone surrogate that came with a JSON escape cannot be sent back as UTF-8.
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
