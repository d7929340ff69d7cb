"""The OpenAI-compatible application over any `EngineClient`."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from specserve.api import convert
from specserve.api.answers import ChatShape, CompletionShape, Head, Shape
from specserve.api.body import read_object
from specserve.api.errors import error_response
from specserve.api.generate import EventStream, Job, collect, until_gone
from specserve.api.limits import BodyLimit, Envelope, request_id_of
from specserve.api.schemas import ChatBody, CompletionBody, Generation, StreamOptions, refuse_unsupported, unknown
from specserve.api.structured import CheckStructured
from specserve.config import Config
from specserve.metrics import HttpMetrics
from specserve.text import Tokenizer
from specserve.types import EngineClient, ModelCard, Request, RequestId

BodyT = TypeVar("BodyT", bound=Generation)


def create_app(
    engine: EngineClient, tokenizer: Tokenizer, config: Config, *, check_structured: CheckStructured
) -> FastAPI:
    """The application: models, completions, chat completions, health, readiness, metrics, version."""
    api = _Api(engine, tokenizer, config, check_structured)
    app = FastAPI(
        title="specserve",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(Envelope, metrics=api.http),
            Middleware(BodyLimit, max_bytes=config.server.max_body_bytes),
        ],
        exception_handlers={HTTPException: _refused, RequestValidationError: _refused},
    )
    app.state.metrics = api.http
    for path, method, handler in api.routes():
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return app


class _Api:
    """The route functions, and what they share."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, config: Config, check_structured: CheckStructured
    ) -> None:
        self._engine = engine
        self._check_structured = check_structured
        self._tokenizer = tokenizer
        self._config = config
        self._fingerprint = _fingerprint(config)
        self.http = HttpMetrics((path, method) for path, method, _ in self.routes())

    def routes(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """Path, method and function of every route."""
        return [
            ("/v1/models", "GET", self.models),
            ("/v1/models/{model_id:path}", "GET", self.model),
            ("/v1/completions", "POST", self.completions),
            ("/v1/chat/completions", "POST", self.chat),
            ("/health", "GET", self.health),
            ("/ready", "GET", self.ready),
            ("/metrics", "GET", self.metrics),
            ("/version", "GET", self.version),
            ("/status.json", "GET", self.status),
            ("/timeline.json", "GET", self.timeline),
        ]

    async def models(self) -> Response:
        """The served model in a list."""
        return JSONResponse({"object": "list", "data": [_model(self._engine.card)]})

    async def model(self, model_id: str) -> Response:
        """The served model; 404 for any other id."""
        card = self._engine.card
        convert.check_model(model_id, card)
        return JSONResponse(_model(card))

    async def completions(self, request: HttpRequest) -> Response:
        """Continue one or more prompts."""
        deadline = self._deadline()
        body = await self._body(request, CompletionBody)
        prompts = convert.prompts_of(body, self._config)
        for prompt in prompts:
            if isinstance(prompt, str):
                convert.check_size(prompt, self._tokenizer, self._engine.card, "prompt")
        tokens = await asyncio.to_thread(self._tokens, prompts)
        return await self._answer(request, self._job(CompletionShape(), body, tokens, deadline), body)

    async def chat(self, request: HttpRequest) -> Response:
        """Answer a conversation."""
        deadline = self._deadline()
        body = await self._body(request, ChatBody)
        messages = convert.messages_of(body)
        for message in messages:
            convert.check_size(str(message["content"]), self._tokenizer, self._engine.card, "messages")
        tokens = await asyncio.to_thread(self._tokenizer.chat_prompt, messages)
        return await self._answer(request, self._job(ChatShape(), body, [tokens], deadline), body)

    async def health(self) -> Response:
        """200 while the target serves, with or without speculation; 503 otherwise."""
        health = await self._engine.health()
        serves = health.status in {"ok", "degraded"}
        speculation = {"speculation": "off"} if health.status == "degraded" else {}
        body = {"status": health.status, **speculation, "detail": health.detail}
        counts = {"running": health.running, "waiting": health.waiting}
        return JSONResponse(body | counts, 200 if serves else 503)

    async def ready(self) -> Response:
        """200 when a request would be served now; 503 otherwise."""
        health = await self._engine.health()
        ready = health.status in {"ok", "degraded"}
        return JSONResponse({"ready": ready, "status": health.status}, 200 if ready else 503)

    async def metrics(self) -> Response:
        """Metrics of the engine and of all HTTP processes."""
        text = await self._engine.metrics(self.http.snapshot())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self) -> Response:
        """What the status page shows."""
        health = await self._engine.health()
        return JSONResponse(await self._engine.status() | {"health": asdict(health)})

    async def timeline(self) -> Response:
        """The last rounds on both devices, for trace viewers."""
        return JSONResponse(await self._engine.timeline())

    async def version(self) -> Response:
        """The server's version."""
        return JSONResponse({"version": _version()})

    async def _body(self, request: HttpRequest, kind: type[BodyT]) -> BodyT:
        data = await read_object(request, self._config.server.request_timeout_s)
        refuse_unsupported(data, kind)
        body = kind.model_validate(data)
        convert.check_model(body.model, self._engine.card)
        convert.check_options(body, self._config)
        for name in unknown(data, kind):
            self.http.unknown_param(name)
        return body

    def _job(self, shape: Shape, body: Generation, prompts: list[list[int]], deadline: float) -> Job:
        """The sequences of one HTTP request, and how it is answered."""
        card, name = self._engine.card, f"{shape.prefix}-{uuid.uuid4().hex}"
        depth = min(self._config.engine.depth, card.max_depth)
        options = body.stream_options or StreamOptions()
        return Job(
            Head(name, int(time.time()), card.name, self._fingerprint, depth),
            shape,
            self._requests(name, body, prompts, card),
            deadline,
            echo=isinstance(body, CompletionBody) and bool(body.echo),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
        )

    def _requests(self, name: str, body: Generation, prompts: list[list[int]], card: ModelCard) -> list[Request]:
        """One engine request per prompt and branch, the branches of a prompt side by side.

        A client that gives no seed gets one per prompt, so that a retry can be exact.
        """
        bad_words = convert.bad_words_of(body, self._tokenizer)
        requests = [
            convert.to_request(
                body, prompt, card, self._config, request_id=name, seed=secrets.randbits(63), bad_words=bad_words
            )
            for prompt in prompts
        ]
        branches = body.n or 1
        if len(requests) * branches == 1:
            return requests
        return [
            replace(
                request,
                id=RequestId(f"{name}-{index * branches + branch}"),
                branch=branch,
                family=f"{name}-{index * branches}" if branches > 1 else None,
            )
            for index, request in enumerate(requests)
            for branch in range(branches)
        ]

    async def _answer(self, request: HttpRequest, job: Job, body: Generation) -> Response:
        structured = job.requests[0].structured  # the same for all sequences
        if structured is not None:
            await asyncio.to_thread(self._check_structured, structured)
        if body.stream:
            return EventStream(job, self._engine, self._tokenizer, self.http)
        work = collect(job, self._engine, self._tokenizer)
        return JSONResponse(await until_gone(request.receive, work))

    def _tokens(self, prompts: list[convert.Prompt]) -> list[list[int]]:
        encode = self._tokenizer.encode
        return [encode(prompt, special=True) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._config.server.request_timeout_s


async def _refused(request: HttpRequest, error: Exception) -> Response:
    return error_response(error, request_id_of(request.scope))


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "specserve",
        "root": card.name,
        "parent": None,
        "max_model_len": card.context_length,
    }


def _fingerprint(config: Config) -> str:
    """Changes whenever anything changes that may change a seeded answer: version, models, speculator, rule, depth."""
    parts = config.model_dump_json(include={"target", "draft", "engine"})
    return "fp_" + hashlib.sha256(f"{_version()} {parts}".encode()).hexdigest()[:12]


def _version() -> str:
    try:
        return version("specserve")
    except PackageNotFoundError:  # run from a source tree
        return "0+unknown"
