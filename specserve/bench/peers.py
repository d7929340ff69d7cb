"""Servers of other engines, each in an environment of its own, asked as ours is.

What they share is OpenAI's completions API, with prompts as token ids, so that every engine gets the same tokens. How
a server drafts, if it does, was said when it was started (`started_peers.py`, or somebody else): with speculation and
without are two servers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import httpx

from specserve.bench.systems import Outcome, Prompts
from specserve.errors import SpecserveError, Unavailable

_PATIENCE_S = 600
_DOOR_S = 5


class Peer:
    """A `System` behind a base URL such as http://127.0.0.1:8081. Raises Unavailable when nobody answers there."""

    def __init__(self, name: str, base_url: str, mode: str = "as started", version: str | None = None) -> None:
        self.name = name
        self.mode = mode
        self.version = version
        self._client = httpx.Client(base_url=base_url, timeout=httpx.Timeout(_PATIENCE_S, connect=_DOOR_S))
        try:
            self._model = self._first_model()
        except BaseException:
            self._client.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def run(self, prompts: Prompts, max_tokens: int, depth: int, concurrency: int) -> Outcome:
        """depth is the server's own affair. Raises SpecserveError unless every answer has max_tokens tokens."""
        del depth
        began = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            choices = list(pool.map(lambda prompt: self._one(prompt, max_tokens), prompts))
        seconds = time.perf_counter() - began
        ids = tuple(tuple(choice["token_ids"]) for choice in choices if isinstance(choice.get("token_ids"), list))
        texts = tuple(choice["text"] for choice in choices if isinstance(choice.get("text"), str))
        return Outcome(
            max_tokens * len(prompts),
            seconds,
            answers=ids if len(ids) == len(prompts) else None,
            texts=texts if len(texts) == len(prompts) else None,
        )

    def _first_model(self) -> str:
        models: Any = self._answer("GET", "/v1/models", None).get("data")
        try:
            return str(models[0]["id"])
        except (TypeError, LookupError):
            raise SpecserveError(f"{self.name} serves no model: /v1/models says {models!r}") from None

    def _one(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """The answer's one choice."""
        asked = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body = self._answer("POST", "/v1/completions", asked)
        made = body.get("usage", {}).get("completion_tokens")
        if made != max_tokens:
            # Answers of another length would make another rate, of another piece of work.
            raise SpecserveError(f"{self.name} answered with {made} tokens where {max_tokens} were asked for")
        choices = body.get("choices")
        return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            reply = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.name} does not answer at {self._client.base_url}: {error}") from None
        if reply.status_code != 200:
            raise SpecserveError(f"{self.name} answered {reply.status_code}: {reply.text[:300]}")
        try:
            answer = reply.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise SpecserveError(
                f"{self.name} answered {path} with something else than a JSON object: {reply.text[:100]}"
            )
        return answer
