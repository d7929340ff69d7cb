"""One span per request for text, from its first byte to its last, with the names of OpenTelemetry's GenAI conventions.

Two layers do it all, and neither is there while tracing is off: one around the routes, which sees the answer's status,
and one around the engine, which sees what is asked and what comes. Prompts and answers never enter a span.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.api.errors import ClientGone, as_specserve, failure_of
from specserve.api.generate import opened
from specserve.api.limits import CLIENT_GONE, request_id_of
from specserve.metrics import Snapshot
from specserve.tracing import Span, Tracer
from specserve.types import Delta, EngineClient, Health, ModelCard, Request

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_CARRIED = ("traceparent", "tracestate")


class _Answer:
    """What is known of an answer while it is made."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self._asked: list[Request] = []
        self._reasons: dict[str, str] = {}
        self._generated = 0
        self._failure: str | None = None

    def asked(self, request: Request) -> None:
        """One of its sequences goes to the engine."""
        self._asked.append(request)

    def came(self, delta: Delta) -> None:
        """A part of one of its sequences is here."""
        self._generated += len(delta.tokens)
        failure = failure_of(delta)
        if failure is not None:
            self._failure = failure.code
        elif delta.finish is not None:
            self._reasons[delta.request] = delta.finish

    def failed(self, code: str) -> None:
        """It ended in an error."""
        self._failure = code

    def end(self, status: int, request_id: str) -> None:
        """Nothing follows."""
        if self._failure is None and len(self._reasons) < len(self._asked):
            self._failure = "interrupted"  # a stream that began, and ended before it was complete
        attributes: dict[str, Any] = {"http.response.status_code": status, "specserve.request_id": request_id}
        if self._asked:
            attributes |= _asked_for(self._asked) | {
                "gen_ai.response.finish_reasons": [self._reasons.get(each.id, "error") for each in self._asked],
                "gen_ai.usage.output_tokens": self._generated,
            }
        if self._failure is not None:
            attributes["error.type"] = self._failure
        self.span.set(attributes)
        # As the HTTP conventions have it: what a client did wrong is no error of the server's.
        self.span.end(failed=status >= 500 or (status == 200 and self._failure is not None))


def _asked_for(requests: list[Request]) -> dict[str, Any]:
    """What a client asked for, read off the sequences that it became: they differ in prompt, seed and branch alone."""
    first = requests[0]
    return {
        "gen_ai.response.id": "-".join(first.id.split("-")[:2]),  # sequences are numbered behind it
        "gen_ai.request.choice.count": 1 + max(each.branch for each in requests),
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": first.sampling.temperature,
        "gen_ai.request.top_p": first.sampling.top_p,
        "gen_ai.request.seed": first.seed,
        "gen_ai.usage.input_tokens": sum(len(each.prompt) for each in requests if each.branch == 0),
    }


_current: ContextVar[_Answer | None] = ContextVar("specserve_answer", default=None)
"""The answer that this task works for, where it is traced."""


class Traced:
    """A span around each request for text; its parent is the client's `traceparent`, where there is one."""

    def __init__(self, app: ASGIApp, tracer: Tracer, model: str) -> None:
        self._app = app
        self._tracer = tracer
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app."""
        answer = self._begun(scope)
        if answer is None:
            await self._app(scope, receive, send)
            return
        token = _current.set(answer)
        try:
            await self._answer(answer, scope, receive, send)
        finally:
            _current.reset(token)

    def _begun(self, scope: Scope) -> _Answer | None:
        operation = _OPERATIONS.get(scope.get("path", "")) if scope["type"] == "http" else None
        if operation is None or scope["method"] != "POST":
            return None
        headers = Headers(scope=scope)
        about = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "specserve",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "http.request.method": "POST",
            "http.route": scope["path"],
        }
        parent = {name: headers[name] for name in _CARRIED if name in headers}
        span = self._tracer.start(f"{operation} {self._model}", parent, about, kind="server")
        return None if span is None else _Answer(span)

    async def _answer(self, answer: _Answer, scope: Scope, receive: Receive, send: Send) -> None:
        status = CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientGone:
            status = CLIENT_GONE
            answer.failed("client_gone")
            raise
        except Exception as error:
            known = as_specserve(error)
            status = known.status
            answer.failed(known.code)
            raise
        finally:
            answer.end(status, request_id_of(scope))


class TracedEngine:
    """An `EngineClient` that tells the engine which span a request belongs to, and the span what the engine says."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    @property
    def card(self) -> ModelCard:
        """See `EngineClient.card`."""
        return self._engine.card

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        """See `EngineClient.stream`."""
        answer = _current.get()
        return self._engine.stream(request) if answer is None else self._watched(answer, request)

    async def _watched(self, answer: _Answer, request: Request) -> AsyncIterator[Delta]:
        request = replace(request, trace=answer.span.traceparent)
        answer.asked(request)
        async with opened(self._engine, request) as source:
            async for delta in source:
                answer.came(delta)
                yield delta

    async def health(self) -> Health:
        """See `EngineClient.health`."""
        return await self._engine.health()

    async def metrics(self, own: Snapshot) -> str:
        """See `EngineClient.metrics`."""
        return await self._engine.metrics(own)

    async def status(self) -> dict[str, Any]:
        """See `EngineClient.status`."""
        return await self._engine.status()

    async def timeline(self) -> dict[str, Any]:
        """See `EngineClient.timeline`."""
        return await self._engine.timeline()
