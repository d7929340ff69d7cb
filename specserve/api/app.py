"""The OpenAI-compatible application over any `EngineClient`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from specserve.api import convert, page
from specserve.api.access import Admission, HeaderLimit, Keys, client_of
from specserve.api.body import parse_object, read_body, taken
from specserve.api.document import document
from specserve.api.errors import as_specserve, error_response
from specserve.api.event_stream import EventStream
from specserve.api.generate import Job, collect, until_gone
from specserve.api.jobs import Jobs
from specserve.api.limits import BodyLimit, Envelope, rename, request_id_of
from specserve.api.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    ModelBody,
    TokenizeBody,
    refuse_unsupported,
    unknown,
)
from specserve.api.structured import CheckStructured
from specserve.api.tokens import detokenized, tokenized
from specserve.api.traces import Traced, TracedEngine
from specserve.config import Config
from specserve.errors import UnsupportedField
from specserve.metrics import HttpMetrics
from specserve.text import Tokenizer
from specserve.tracing import Tracer, tracer_of
from specserve.types import EngineClient, ModelCard

BodyT = TypeVar("BodyT", bound=ModelBody)
GenerationT = TypeVar("GenerationT", bound=Generation)


def create_app(
    engine: EngineClient, tokenizer: Tokenizer, config: Config, *, check_structured: CheckStructured
) -> FastAPI:
    """The application: models, completions, chat completions, the tokenizer, and what operators ask.

    Its `state` holds the metrics, and the tracer, which whoever ends the application closes. Raises ConfigError where
    spans are wanted and cannot be made.
    """
    tracer = tracer_of(config.observe.tracing, "ingress")
    api = _Api(engine if tracer is None else TracedEngine(engine), tokenizer, config, check_structured)
    app = FastAPI(
        title="specserve",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        middleware=_layers(config, api.http, tracer),
        exception_handlers={HTTPException: api.refused, RequestValidationError: api.refused},
    )
    app.state.metrics, app.state.tracer = api.http, tracer
    for path, method, handler in api.routes():
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return app


def _layers(config: Config, metrics: HttpMetrics, tracer: Tracer | None) -> list[Middleware]:
    """What surrounds the routes, outermost first."""
    server = config.server
    cors = Middleware(
        CORSMiddleware,
        allow_origins=server.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=(
            "Authorization",
            "Content-Type",
            "X-Request-Id",
            "Traceparent",
            "Tracestate",
            convert.TIMEOUT_HEADER,
        ),
        expose_headers=("X-Request-Id", "Retry-After", "Retry-After-Ms"),
        allow_credentials=False,  # keys travel in a header, which pages set themselves
    )
    return [
        *([cors] if server.cors_origins else []),
        Middleware(Envelope, metrics=metrics),
        *([] if tracer is None else [Middleware(Traced, tracer=tracer, model=config.served_name)]),
        Middleware(HeaderLimit, max_bytes=server.max_header_bytes),
        Middleware(Keys, config=server),
        Middleware(Admission, config=server, places=_places(config)),
        Middleware(BodyLimit, max_bytes=server.max_body_bytes),
    ]


def _places(config: Config) -> int:
    """Requests that all pipelines together keep, running and waiting."""
    return config.cluster.pipelines * (config.engine.max_requests + config.engine.queue_limit)


class _Api:
    """The route functions, and what they share."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, config: Config, check_structured: CheckStructured
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._jobs = Jobs(engine, tokenizer, config, check_structured, _fingerprint(config))
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
            ("/openapi.json", "GET", self.openapi),
            *((path, "GET", partial(_page, path)) for path in page.FILES),
            ("/status.json", "GET", self.status),
            ("/timeline.json", "GET", self.timeline),
            ("/load", "GET", self.load),
            ("/tokenize", "POST", self.tokenize),
            ("/detokenize", "POST", self.detokenize),
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
        began = asyncio.get_running_loop().time()
        body = await self._generation(request, CompletionBody)
        deadline = began + convert.time_limit(body, request.headers, self._config)
        return await self._answer(request, await self._jobs.completion(body, deadline), body)

    async def chat(self, request: HttpRequest) -> Response:
        """Answer a conversation."""
        began = asyncio.get_running_loop().time()
        body = await self._generation(request, ChatBody)
        deadline = began + convert.time_limit(body, request.headers, self._config)
        return await self._answer(request, await self._jobs.chat(body, deadline), body)

    async def tokenize(self, request: HttpRequest) -> Response:
        """The tokens of a text or a conversation."""
        body, most = await self._body(request, TokenizeBody), self._config.server.max_tools
        work = asyncio.to_thread(tokenized, body, self._tokenizer, self._engine.card, most)
        return JSONResponse(await work)

    async def detokenize(self, request: HttpRequest) -> Response:
        """The text of tokens."""
        body = await self._body(request, DetokenizeBody)
        return JSONResponse(await asyncio.to_thread(detokenized, body, self._tokenizer, self._engine.card))

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

    async def openapi(self) -> Response:
        """The OpenAPI document of all this."""
        routes = [(path, method, str(handler.__doc__).splitlines()[0]) for path, method, handler in self.routes()]
        return JSONResponse(document(routes, _version()))

    async def load(self) -> Response:
        """How many sequences run and wait, for balancers in front of several servers."""
        health = await self._engine.health()
        counts = {"running": health.running, "waiting": health.waiting}
        return JSONResponse({"server_load": health.running + health.waiting} | counts)

    async def _generation(self, request: HttpRequest, kind: type[GenerationT]) -> GenerationT:
        body = await self._body(request, kind)
        convert.check_options(body, self._config)
        if body.request_id is not None:
            rename(request.scope, body.request_id)
        return body

    async def _body(self, request: HttpRequest, kind: type[BodyT]) -> BodyT:
        server = self._config.server
        raw = await read_body(request, min(server.body_timeout_s, server.request_timeout_s))
        body, names = await taken(raw, partial(_checked, kind=kind, strict=server.strict_params))
        self.http.unknown_params(names)
        convert.check_model(body.model, self._engine.card)
        return body

    async def _answer(self, request: HttpRequest, job: Job, body: Generation) -> Response:
        client = client_of(request.scope)
        job = replace(job, requests=[replace(each, client=client) for each in job.requests])
        if body.stream:
            return EventStream(job, self._engine, self._tokenizer, self.http)
        work = collect(job, self._engine, self._tokenizer)
        return JSONResponse(await until_gone(request.receive, job, work))

    async def refused(self, request: HttpRequest, error: Exception) -> Response:
        """The answer to what the router itself refuses: paths and methods that are not there."""
        self.http.rejected(as_specserve(error).code)
        return error_response(error, request_id_of(request.scope))


def _checked(raw: bytes, kind: type[BodyT], strict: bool) -> tuple[BodyT, list[str]]:
    """A body, and the names of its fields that nobody here knows; where `strict`, those are refused."""
    data = parse_object(raw)
    refuse_unsupported(data, kind)
    names = unknown(data, kind)
    if names and strict:
        raise UnsupportedField(
            f"unknown {'field' if len(names) == 1 else 'fields'} {', '.join(sorted(names))}; leave out what is not "
            "needed, or set server.strict_params to false to have unknown fields ignored",
            param=min(names),
        )
    return kind.model_validate(data), names


async def _page(path: str) -> Response:
    return page.answer(path)


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
    told: dict[str, Any] = {"target": True, "draft": True, "engine": True, "server": {"sampling_defaults"}}
    parts = config.model_dump_json(include=told)
    return "fp_" + hashlib.sha256(f"{_version()} {parts}".encode()).hexdigest()[:12]


def _version() -> str:
    try:
        return version("specserve")
    except PackageNotFoundError:  # run from a source tree
        return "0+unknown"
