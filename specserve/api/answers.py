"""From deltas to OpenAI's objects: the text of one sequence, usage, speculation numbers, whole answers and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specserve.text import AnswerText, Tokenizer
from specserve.types import Delta, Request, RequestStats, TokenLogprob


@dataclass(frozen=True, slots=True)
class Scored:
    """A token's log-probability, and where in the choice's text the token begins, in characters."""

    score: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a delta makes visible: text, and a score per token where the client asked."""

    text: str
    scores: list[Scored]


class Answer:
    """One sequence as it grows: its tokens, and the text of them that may be shown; with `echo`, behind its prompt."""

    def __init__(self, request: Request, tokenizer: Tokenizer, *, echo: bool = False) -> None:
        self.request = request
        self.text = ""
        self.tokens = 0
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.stats: RequestStats | None = None
        self.scores: list[Scored] = []
        self._end_tokens = tokenizer.end_tokens - frozenset(request.stop_token_ids)
        self._echoed = request.prompt if echo else ()
        self._visible = AnswerText(tokenizer, request.stop, len(self._echoed) + request.sampling.min_tokens)

    def add(self, delta: Delta) -> Piece:
        """Take a delta; returns what it makes visible."""
        self.tokens += len(delta.tokens)
        echoed, self._echoed = self._echoed, ()
        shown: list[str] = []
        scores = [*self._push(echoed, delta.prompt_logprobs, shown), *self._push(delta.tokens, delta.logprobs, shown)]
        if delta.finish is not None:
            shown.append(self._end(delta))
        piece = Piece("".join(shown), scores)
        self.text += piece.text
        self.scores += scores
        return piece

    def _push(self, tokens: Sequence[int], scores: Sequence[TokenLogprob], shown: list[str]) -> list[Scored]:
        offsets = []
        for token in tokens:
            offsets.append(self._visible.length)
            shown.append(self._visible.push(token))
        return [Scored(score, offset) for score, offset in zip(scores, offsets, strict=False)]

    def _end(self, delta: Delta) -> str:
        self.finish = delta.finish
        self.stats = delta.stats
        # The model's own end is the ordinary end and needs no reason; an id that the client named is one.
        self.stop_reason = None if delta.stop_reason in self._end_tokens else delta.stop_reason
        return self._visible.flush()


class Shape(Protocol):
    """How one endpoint spells its choices."""

    prefix: str
    whole: str
    chunk: str

    def opening(self) -> dict[str, Any] | None:
        """What the first chunk of a choice holds besides its index, if there is a chunk before any text."""
        ...

    def piece(self, text: str) -> dict[str, Any]:
        """What a chunk with more text holds; "" for the last chunk."""
        ...

    def full(self, text: str) -> dict[str, Any]:
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

    def piece(self, text: str) -> dict[str, Any]:
        """Text beside the index."""
        return {"text": text}

    def full(self, text: str) -> dict[str, Any]:
        """Text beside the index."""
        return {"text": text}

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

    def piece(self, text: str) -> dict[str, Any]:
        """Text in a delta."""
        return {"delta": {"content": text} if text else {}}

    def full(self, text: str) -> dict[str, Any]:
        """A message of the assistant."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, scores: Sequence[Scored], tokenizer: Tokenizer) -> dict[str, Any]:
        """One object per token."""
        entries = []
        for scored in scores:
            score = scored.score
            top = [_entry(token, value, tokenizer) for token, value in score.top]
            entries.append(_entry(score.token, score.logprob, tokenizer) | {"top_logprobs": top})
        return {"content": entries, "refusal": None}


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one HTTP answer starts with. `depth` is the deployment's chain length."""

    id: str
    created: int
    model: str
    fingerprint: str
    depth: int

    def fields(self, kind: str) -> dict[str, Any]:
        """The common fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def whole_answer(head: Head, shape: Shape, answers: Sequence[Answer], tokenizer: Tokenizer) -> dict[str, Any]:
    """The object of an answer that is not streamed."""
    choices = []
    for index, answer in enumerate(answers):
        asked = answer.request.logprobs is not None
        logprobs = shape.logprobs(answer.scores, tokenizer) if asked else None
        choices.append(_choice(index, shape.full(answer.text), answer, logprobs))
    return head.fields(shape.whole) | {"choices": choices, "usage": usage(answers)} | metrics_field(head, answers)


def opening_chunk(head: Head, shape: Shape, index: int) -> dict[str, Any] | None:
    """The chunk before any text of a choice, where the endpoint has one."""
    opening = shape.opening()
    return None if opening is None else _chunk(head, shape, _choice(index, opening, None))


def text_chunk(head: Head, shape: Shape, index: int, piece: Piece, tokenizer: Tokenizer) -> dict[str, Any]:
    """A chunk with more text of a choice, or with the scores of tokens whose text is held back."""
    logprobs = shape.logprobs(piece.scores, tokenizer) if piece.scores else None
    return _chunk(head, shape, _choice(index, shape.piece(piece.text), None, logprobs))


def last_chunk(head: Head, shape: Shape, index: int, answer: Answer) -> dict[str, Any]:
    """The chunk that says why a choice ended."""
    return _chunk(head, shape, _choice(index, shape.piece(""), answer))


def usage_chunk(head: Head, shape: Shape, answers: Sequence[Answer]) -> dict[str, Any]:
    """The chunk without choices that ends a stream whose client asked for usage."""
    return head.fields(shape.chunk) | {"choices": [], "usage": usage(answers)} | metrics_field(head, answers)


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens of all sequences so far; a prompt counts once however many answers it gets."""
    prompt = sum(len(answer.request.prompt) for answer in answers if answer.request.branch == 0)
    completion = sum(answer.tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def metrics_field(head: Head, answers: Sequence[Answer]) -> dict[str, Any]:
    """{"metrics": …} of a single sequence that ended with stats; nothing otherwise.

    Times are milliseconds. generation_time_ms and tokens_per_second leave the wait for the first token out.
    """
    if len(answers) != 1 or answers[0].stats is None:
        return {}
    answer, stats = answers[0], answers[0].stats
    decode_s = max(0.0, stats.total_s - stats.first_token_s)
    rate = (stats.generated_tokens - 1) / decode_s if stats.generated_tokens > 1 and decode_s > 0 else None
    numbers: dict[str, Any] = {
        "time_to_first_token_ms": _ms(stats.first_token_s),
        "queue_time_ms": _ms(stats.queue_s),
        "generation_time_ms": _ms(decode_s),
        "tokens_per_second": None if rate is None else round(rate, 3),
    }
    asked = head.depth if answer.request.depth is None else answer.request.depth
    speculation = _speculation(stats, asked)
    return {"metrics": numbers if speculation is None else numbers | {"speculative_decoding": speculation}}


def _speculation(stats: RequestStats, depth: int) -> dict[str, Any] | None:
    longest = max(depth, len(stats.histogram) - 1)
    if longest == 0:
        return None
    steps = sum(stats.histogram)
    return {
        "mean_acceptance_length": round(1 + stats.kept_tokens / steps, 4) if steps else None,
        "draft_acceptance_rate": round(stats.kept_tokens / stats.drafted_tokens, 4) if stats.drafted_tokens else None,
        "acceptance_histogram": [*stats.histogram, *[0] * (longest + 1 - len(stats.histogram))],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.kept_tokens,
        "num_draft_tokens": stats.drafted_tokens,
        "num_spec_tokens": longest,
    }


def _choice(
    index: int, content: dict[str, Any], ended: Answer | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    reason = None if ended is None else ended.finish
    stop_reason = None if ended is None else ended.stop_reason
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop_reason}


def _chunk(head: Head, shape: Shape, choice: dict[str, Any]) -> dict[str, Any]:
    return head.fields(shape.chunk) | {"choices": [choice]}


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


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
