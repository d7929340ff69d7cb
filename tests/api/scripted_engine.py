"""An engine that plays a script at the HTTP room's seam, and a client that talks to the app in process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import tiny_tokenizer
from fastapi import FastAPI

from specserve.api.app import create_app
from specserve.config import Config
from specserve.metrics import Ledger, Snapshot
from specserve.sampling.grammar import Grammars
from specserve.text import Tokenizer
from specserve.types import Delta, FinishReason, Health, ModelCard, Request, RequestId, RequestStats

CARD = ModelCard(
    "tiny",
    created=1_700_000_000,
    context_length=256,
    vocab_size=421,
    max_depth=4,
    speculator="small_model",
    rules={"rejection": True, "coupled": True, "typical": False},
    sources=("ngram", "prediction", "small_model"),
)
NOBODY = RequestId("")

Step = Delta | Exception | Callable[[], Awaitable[None]]

TOKENIZER = Tokenizer(
    tiny_tokenizer.byte_level(),
    end_tokens=frozenset({0, 2}),
    chat_template=tiny_tokenizer.TEMPLATE,
    special_tokens={"bos_token": "<|start|>", "eos_token": "<|end|>"},
)


def stats(generated: int, histogram: tuple[int, ...] = (1, 0, 2)) -> RequestStats:
    """Plausible numbers: drafts of 2 in each round."""
    kept = sum(index * count for index, count in enumerate(histogram))
    return RequestStats(5, generated, sum(histogram), 2 * sum(histogram), kept, histogram, 0.01, 0.05, 0.25)


def said(
    *texts: str, finish: FinishReason = "stop", stop_reason: int | str | None = None, stats_: RequestStats | None = None
) -> list[Step]:
    """Deltas that carry these texts, the last of which ends the answer."""
    tokens = [tuple(TOKENIZER.encode(text, special=False)) for text in texts]
    deltas: list[Step] = [Delta(NOBODY, part) for part in tokens[:-1]]
    numbers = stats_ or stats(sum(map(len, tokens)))
    return [*deltas, Delta(NOBODY, tokens[-1], finish=finish, stop_reason=stop_reason, stats=numbers)]


def usage(prompt: int, completion: int, accepted: int = 0, rejected: int = 0) -> dict[str, object]:
    """The usage object of an answer."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected},
    }


class ScriptedEngine:
    """Plays `script(request)`: yields deltas, raises exceptions, awaits pauses. Remembers what was asked and closed."""

    def __init__(
        self, script: Callable[[Request], Sequence[Step]] | Sequence[Step] = (), card: ModelCard = CARD
    ) -> None:
        self._script = script
        self.card = card
        self.state = Health("ok", running=1, waiting=2)
        self.requests: list[Request] = []
        self.closed: list[RequestId] = []
        self.yielded = 0
        self.all_closed = asyncio.Event()

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Play the script for one request."""
        self.requests.append(request)
        try:
            for step in self._script(request) if callable(self._script) else self._script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, Delta):
                    self.yielded += 1
                    yield replace(step, request=request.id)
                else:
                    await step()
        finally:
            self.closed.append(request.id)
            if len(self.closed) == len(self.requests):
                self.all_closed.set()

    async def health(self) -> Health:
        """The state that the test set."""
        return self.state

    async def metrics(self, own: Snapshot) -> str:
        """The HTTP process's own, and nothing else."""
        ledger = Ledger()
        ledger.take("http", own)
        return ledger.render()

    async def status(self) -> dict[str, Any]:
        """Next to nothing."""
        return {"model": CARD.name}

    async def timeline(self) -> dict[str, Any]:
        """No rounds."""
        return {"traceEvents": []}


def app_of(engine: ScriptedEngine, tracing: Mapping[str, object] | None = None, **server: object) -> FastAPI:
    """The application over a scripted engine; `server` overrides limits, `tracing` says where spans go."""
    observe = {"tracing": tracing or {}}
    config = Config.model_validate({"model_name": "tiny", "server": server, "observe": observe})
    check = partial(Grammars(TOKENIZER).check, max_bytes=config.server.max_schema_bytes)
    return create_app(engine, TOKENIZER, config, check_structured=check)


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to the app, in process."""

    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(one())


def chat(app: FastAPI, **fields: object) -> httpx.Response:
    """A chat request with one user message unless `fields` says otherwise."""
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return call(app, "POST", "/v1/chat/completions", json=body)


def complete(app: FastAPI, **fields: object) -> httpx.Response:
    """A completion of "hi" unless `fields` says otherwise."""
    return call(app, "POST", "/v1/completions", json={"prompt": "hi"} | fields)


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each event of a stream; "[DONE]" stays a string."""
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    data = [block.removeprefix("data: ") for block in blocks[:-1]]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
