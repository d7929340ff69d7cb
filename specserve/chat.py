"""A terminal chat over HTTP: streams the answer, then says how fast it was and how much of it was drafted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import httpx

from specserve.errors import SpecserveError, Unavailable


class Chat:
    """One conversation with one server."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int = 512,
        depth: int | None = None,
        out: TextIO = sys.stdout,
    ) -> None:
        self._client = httpx.Client(base_url=url, timeout=httpx.Timeout(600, connect=5))
        self._url = url
        self._model = model
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._depth = depth
        self._out = out
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def run(self) -> None:
        """Read lines until end of input or `/quit`; `/clear` starts over. Raises a SpecserveError without a server."""
        self._print(f"Chatting with {self.model()}; /clear starts over, /quit or Ctrl-D ends.\n")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                self._print("\n")
                return
            if line == "/quit":
                return
            if line == "/clear":
                self._messages = [message for message in self._messages if message["role"] == "system"]
            elif line:
                self.say(line)

    def model(self) -> str:
        """The model in use: the one named, or the first that the server lists."""
        if self._model is None:
            reply = self._call("GET", "/v1/models")
            self._model = str(reply["data"][0]["id"])
        return self._model

    def say(self, text: str) -> str:
        """Send one message, print the answer as it comes, and return it."""
        self._messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {
            "model": self.model(),
            "messages": self._messages,
            "max_tokens": self._max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._temperature is not None:
            body["temperature"] = self._temperature
        if self._depth is not None:
            body["speculation"] = (
                {"enabled": self._depth > 0, "depth": self._depth} if self._depth else {"enabled": False}
            )
        began = time.perf_counter()
        answer, last = "", {}
        for chunk in self._events(body):
            last = chunk
            for choice in chunk.get("choices", []):
                piece = choice["delta"].get("content") or ""
                answer += piece
                self._print(piece)
        self._messages.append({"role": "assistant", "content": answer})
        self._print(f"\n{_summary(last, time.perf_counter() - began)}\n")
        return answer

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise SpecserveError(_error_text(reply))
                for line in reply.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise SpecserveError(event["error"]["message"])
                        yield event
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _call(self, method: str, path: str) -> dict[str, Any]:
        try:
            reply = self._client.request(method, path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if reply.status_code != 200:
            raise SpecserveError(_error_text(reply))
        found: dict[str, Any] = reply.json()
        return found

    def _unreachable(self, error: httpx.HTTPError) -> Unavailable:
        return Unavailable(f"no answer from {self._url} ({error}); is `specserve serve` running there?")

    def _print(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _error_text(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {reply.status_code}"


def _summary(last: dict[str, Any], seconds: float) -> str:
    tokens = (last.get("usage") or {}).get("completion_tokens")
    if tokens is None:
        return f"[{seconds:.1f} s]"
    text = f"[{tokens} tokens, {tokens / seconds:.1f}/s"
    speculative = (last.get("metrics") or {}).get("speculative_decoding")
    if speculative and speculative.get("num_draft_tokens"):
        kept, drafted = speculative["num_accepted_draft_tokens"], speculative["num_draft_tokens"]
        text += f"; {kept} of {drafted} drafted tokens kept, {speculative['mean_acceptance_length']:.2f} per round"
    return text + "]"
