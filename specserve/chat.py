"""A terminal chat over HTTP: streams the answer, then says how fast it was and how much of it was drafted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, TextIO

import httpx

from specserve.errors import ConfigError, ModelNotFound, SpecserveError, Unavailable

_HELP = """\
/help    shows this
/clear   starts over; a system prompt stays
/quit    ends, as Ctrl-D does
Ctrl-C stops an answer.
"""


_CUT = "the answer was cut: the server ended it before it was finished"


class Chat:
    """One conversation with one server."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int = 512,
        depth: int | None = None,
        out: TextIO | None = None,
    ) -> None:
        """url is the server's, with or without http:// and a trailing /v1. Raises ConfigError when it is not one."""
        self._url = server_url(url)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(base_url=self._url, timeout=httpx.Timeout(600, connect=5), headers=headers)
        self._wanted = model
        self._model: str | None = None
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._depth = depth
        self._out = sys.stdout if out is None else out
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def run(self) -> int:
        """Read lines until end of input or `/quit`. A failed answer is told, and the chat goes on.

        Returns how many messages had no answer: who sends some through a pipe reads the exit status. Raises a
        SpecserveError when there is no server, or when it does not serve the model.
        """
        self._print(f"Chatting with {self.model()}; /help lists commands, Ctrl-D ends.\n")
        unanswered = 0
        while (line := self._read()) is not None and line != "/quit":
            if line.startswith("/"):
                self._command(line)
            elif line:
                unanswered += not self._turn(line)
        return unanswered

    def model(self) -> str:
        """The model in use: the one named, or the first that the server lists. Raises ModelNotFound."""
        if self._model is None:
            served = self._served()
            if self._wanted is not None and self._wanted not in served:
                raise ModelNotFound(f"{self._url} serves no model called {self._wanted!r}, but {', '.join(served)}")
            self._model = self._wanted or served[0]
        return self._model

    def say(self, text: str) -> str:
        """Send one message, print the answer as it comes, and return it.

        Raises a SpecserveError when the answer fails; then the conversation is as it was before. What came before
        a KeyboardInterrupt is the answer.
        """
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        stopped = False
        try:
            self._stream(pieces)
        except KeyboardInterrupt:
            stopped = True
            self._print("\n[stopped]\n")
        except SpecserveError:
            self._messages.pop()
            raise
        answer = "".join(pieces)
        if stopped and not answer:
            self._messages.pop()
        else:
            self._messages.append({"role": "assistant", "content": answer})
        return answer

    def _read(self) -> str | None:
        """The next line; None at the end of input."""
        try:
            return input("> ").strip()
        except EOFError:
            self._print("\n")
            return None
        except KeyboardInterrupt:
            self._print("\n/quit or Ctrl-D ends.\n")
            return ""

    def _command(self, line: str) -> None:
        if line == "/clear":
            self._messages = [message for message in self._messages if message["role"] == "system"]
            self._print("[the conversation starts over]\n")
        elif line == "/help":
            self._print(_HELP)
        else:
            self._print(f"there is no command {line.split(maxsplit=1)[0]}\n{_HELP}")

    def _turn(self, line: str) -> bool:
        """Whether a message was answered; where not, it is told why."""
        try:
            self.say(line)
        except SpecserveError as error:
            self._print(f"\n[not answered: {error.message}]\n")
            return False
        return True

    def _stream(self, pieces: list[str]) -> None:
        """Print the answer and its summary; `pieces` holds what came even when this is interrupted."""
        began = time.perf_counter()
        last: dict[str, Any] = {}
        finish: str | None = None
        with closing(self._events(self._body())) as events:
            for last in events:
                for choice in last.get("choices", []):
                    piece = choice["delta"].get("content") or ""
                    pieces.append(piece)
                    self._print(piece)
                    finish = choice.get("finish_reason") or finish
        if not last:
            raise SpecserveError(f"{self._url} sent no answer; is it a specserve server (--url)?")
        if finish in (None, "abort"):
            raise SpecserveError(_CUT)
        self._print(f"\n{_summary(last, time.perf_counter() - began)}\n")

    def _body(self) -> dict[str, Any]:
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
            body["speculation"] = {"enabled": True, "depth": self._depth} if self._depth else {"enabled": False}
        return body

    def _events(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
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
        except httpx.RemoteProtocolError:
            raise SpecserveError(_CUT) from None
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except ValueError:
            raise SpecserveError(f"{self._url} sent an event that is not JSON; is it a specserve server?") from None

    def _served(self) -> list[str]:
        """The names of the server's models, never none."""
        try:
            reply = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if reply.status_code != 200:
            raise SpecserveError(f"{self._url}: {_error_text(reply)}")
        try:
            names = [str(model["id"]) for model in reply.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise SpecserveError(f"{self._url} does not answer as an OpenAI-compatible server; check --url") from None
        if not names:
            raise ModelNotFound(f"{self._url} serves no model")
        return names

    def _unreachable(self, error: httpx.HTTPError) -> Unavailable:
        return Unavailable(f"no answer from {self._url} ({error}); is `specserve serve` running there (--url)?")

    def _print(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def server_url(text: str) -> str:
    """The root of a server from what people type: `localhost:8000`, or a base URL that ends in /v1.

    Raises ConfigError for what is no HTTP address.
    """
    full = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        url = httpx.URL(full)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {text!r} is not an address: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--url takes an http or https address such as http://127.0.0.1:8000, found {text!r}")
    return str(url).rstrip("/").removesuffix("/v1")


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
