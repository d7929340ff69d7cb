"""The layers around the routes, as plain ASGI (a wrapped receive, never a copied body or a hidden disconnect)."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve import logs
from specserve.api import page
from specserve.api.errors import ClientGone, as_specserve, error_response
from specserve.api.schemas import REQUEST_ID
from specserve.errors import BodyTooLarge, SpecserveError
from specserve.metrics import HttpMetrics

_REQUEST_ID = re.compile(REQUEST_ID)

CLIENT_GONE = 499

_QUIET = frozenset({"/health", "/ready", "/metrics", "/status.json", "/load", *page.FILES})

log = logging.getLogger(__name__)


class BodyLimit:
    """Refuses bodies over `max_bytes`, by their announced length and by what really arrives. Raises BodyTooLarge."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app behind the limit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isascii() and announced.isdigit():
            self._check(int(announced[:20]))
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            self._check(total)
            return message

        return counted

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise BodyTooLarge(f"the body is larger than {self._max_bytes} bytes")


class Envelope:
    """What is the same for every request: an id, the counters, and an answer for whatever was raised inside."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; never raises for an HTTP request, except that a cancelled task stays cancelled."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        rename(scope, _request_id(scope))
        reply = _Reply(send, scope)
        self._metrics.started()
        began = time.perf_counter()
        try:
            await self._app(scope, receive, reply.send)
        except ClientGone as gone:
            reply.status = CLIENT_GONE
            self._metrics.disconnected(gone.stage)
        except Exception as error:
            await self._answer(error, scope, receive, reply)
        finally:
            self._metrics.ended(_template(scope), scope["method"], reply.status)
            _tell(scope, reply.status, time.perf_counter() - began)

    async def _answer(self, error: Exception, scope: Scope, receive: Receive, reply: _Reply) -> None:
        if not reply.started:
            known = as_specserve(error)
            if known.status != SpecserveError.status:  # that one was not refused, it failed
                self._metrics.rejected(known.code)
            response = error_response(error, request_id_of(scope))
            await response(scope, receive, reply.send)


class _Reply:
    """The way back to the client: adds the request id, remembers the status."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self._scope = scope
        self.status = CLIENT_GONE
        self.started = False

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            MutableHeaders(raw=message.setdefault("headers", []))["X-Request-Id"] = request_id_of(self._scope)
        await self._send(message)


def _tell(scope: Scope, status: int, seconds: float) -> None:
    """A line for each answer, by route template; what asks all the time is left out."""
    template = _template(scope)
    if template not in _QUIET:
        extra = {"method": scope["method"], "route": template, "status": status, "seconds": round(seconds, 4)}
        log.info("%s %s %d in %.3f s", scope["method"], template or "(no route)", status, seconds, extra=extra)


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """The id under which this request is answered and logged."""
    found: str = scope["specserve.request_id"]
    return found


def rename(scope: MutableMapping[str, Any], request_id: str) -> None:
    """Answer and log a request under this id."""
    scope["specserve.request_id"] = request_id
    logs.request_id.set(request_id)


def _request_id(scope: Scope) -> str:
    """The client's own id where it is short and plain, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _template(scope: Scope) -> str:
    return str(getattr(scope.get("route"), "path", ""))
