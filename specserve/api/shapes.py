"""How each endpoint spells its choices and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specserve.api.answers import Answer, Piece, Scored
from specserve.text import Tokenizer
from specserve.types import TokenLogprob


class Shape(Protocol):
    """How one endpoint spells its choices."""

    prefix: str
    whole: str
    chunk: str

    def opening(self) -> dict[str, Any] | None:
        """What the first chunk of a choice holds besides its index, if there is a chunk before any text."""
        ...

    def piece(self, piece: Piece, calls_before: int) -> dict[str, Any]:
        """What a chunk with more text and calls holds; an empty piece for the last chunk."""
        ...

    def full(self, answer: Answer) -> dict[str, Any]:
        """What a choice of a whole answer holds."""
        ...

    def logprobs(self, scores: Sequence[Scored], tokenizer: Tokenizer) -> dict[str, Any]:
        """The log-probabilities of these tokens."""
        ...


class CompletionShape:
    """/v1/completions."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def opening(self) -> dict[str, Any] | None:
        """Completions start with text."""
        return None

    def piece(self, piece: Piece, calls_before: int) -> dict[str, Any]:
        """Text beside the index."""
        return {"text": piece.text}

    def full(self, answer: Answer) -> dict[str, Any]:
        """Text beside the index."""
        return {"text": answer.text}

    def logprobs(self, scores: Sequence[Scored], tokenizer: Tokenizer) -> dict[str, Any]:
        """Four parallel lists. The alternatives include the token itself; those that look alike are one."""
        spelt = [tokenizer.token_text(scored.score.token)[0] for scored in scores]
        return {
            "tokens": spelt,
            "token_logprobs": [_finite(scored.score.logprob) for scored in scores],
            "top_logprobs": [
                _alternatives(scored.score, text, tokenizer) for scored, text in zip(scores, spelt, strict=True)
            ],
            "text_offset": [scored.offset for scored in scores],
        }


class ChatShape:
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self) -> dict[str, Any] | None:
        """Chats start with the role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, piece: Piece, calls_before: int) -> dict[str, Any]:
        """Text in a delta, and each call whole, under its number in the answer."""
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            numbered = enumerate(piece.calls, start=calls_before)
            delta["tool_calls"] = [{"index": index, **call.fields()} for index, call in numbered]
        return {"delta": delta}

    def full(self, answer: Answer) -> dict[str, Any]:
        """A message of the assistant; without content where it only calls tools."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": [call.fields() for call in answer.calls]}
        return {"message": message}

    def logprobs(self, scores: Sequence[Scored], tokenizer: Tokenizer) -> dict[str, Any]:
        """One object per token."""
        entries = []
        for scored in scores:
            score = scored.score
            top = [_entry(token, value, tokenizer) for token, value in score.top]
            entries.append(_entry(score.token, score.logprob, tokenizer) | {"top_logprobs": top})
        return {"content": entries, "refusal": None}


_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST_LOGPROB)


def _alternatives(score: TokenLogprob, text: str, tokenizer: Tokenizer) -> dict[str, float | None] | None:
    if score.logprob is None:
        return None
    found = {text: _finite(score.logprob)}
    for token, value in score.top:
        found.setdefault(tokenizer.token_text(token)[0], _finite(value))
    return found


def _entry(token: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    text, raw = tokenizer.token_text(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}
