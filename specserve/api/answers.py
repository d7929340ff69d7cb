"""From deltas to OpenAI's objects: the text of one sequence, usage, speculation numbers, whole answers and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specserve.api.tools import CallReader, ToolCall
from specserve.text import AnswerText, Tokenizer
from specserve.types import Delta, ModelCard, Request, RequestStats, RuleName, TokenLogprob


@dataclass(frozen=True, slots=True)
class Scored:
    """A token's log-probability, and where in the choice's text the token begins, in characters."""

    score: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a delta makes visible: text, a score per token where the client asked, whole calls of tools, its tokens.

    shown is the text that each token made visible; what the end set free is the last one's.
    """

    text: str
    scores: list[Scored]
    calls: list[ToolCall] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    shown: tuple[str, ...] = ()


class Answer:
    """One sequence as it grows: its tokens, and the text of them that may be shown; with `echo`, behind its prompt.

    `keep_stop` shows the stop text that ended it. `reader` takes the calls of tools out of the text.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        echo: bool = False,
        keep_stop: bool = False,
        reader: CallReader | None = None,
    ) -> None:
        self.request = request
        self.text = ""
        self.calls: list[ToolCall] = []
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.stats: RequestStats | None = None
        self.scores: list[Scored] = []
        self._end_tokens = tokenizer.end_tokens - frozenset(request.stop_token_ids)
        self._echoed = request.prompt if echo else ()
        unsearched = len(self._echoed) + request.sampling.min_tokens
        self._visible = AnswerText(tokenizer, request.stop, unsearched, keep_stop=keep_stop)
        self._reader = reader

    def add(self, delta: Delta) -> Piece:
        """Take a delta; returns what it makes visible."""
        self.tokens += delta.tokens
        echoed, self._echoed = self._echoed, ()
        before: list[str] = []
        shown: list[str] = []
        scores = [*self._push(echoed, delta.prompt_logprobs, before), *self._push(delta.tokens, delta.logprobs, shown)]
        if delta.finish is not None:
            rest = self._end(delta)
            shown = [*shown[:-1], "".join(shown[-1:]) + rest]
        text, calls = self._read("".join([*before, *shown]), ended=delta.finish is not None)
        self.text += text
        self.calls += calls
        self.scores += scores
        return Piece(text, scores, calls, delta.tokens, tuple(shown[: len(delta.tokens)]))

    def _read(self, shown: str, *, ended: bool) -> tuple[str, list[ToolCall]]:
        if self._reader is None:
            return shown, []
        text, calls = self._reader.push(shown)
        if not ended:
            return text, calls
        rest, cut = self._reader.flush()
        return text + rest, calls + cut

    @property
    def reason(self) -> str | None:
        """Why it ended, in OpenAI's words."""
        return "tool_calls" if self.finish == "stop" and self.calls else self.finish

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


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one HTTP answer starts with. `rule` is the deployment's."""

    id: str
    created: int
    card: ModelCard
    fingerprint: str
    rule: RuleName

    def fields(self, kind: str) -> dict[str, Any]:
        """The common fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.card.name,
            "system_fingerprint": self.fingerprint,
        }


def whole_answer(
    head: Head, shape: Shape, answers: Sequence[Answer], tokenizer: Tokenizer, *, token_ids: bool = False
) -> dict[str, Any]:
    """The object of an answer that is not streamed. `token_ids` tells the tokens of prompts and answers."""
    choices = []
    for index, answer in enumerate(answers):
        asked = answer.request.logprobs is not None
        logprobs = shape.logprobs(answer.scores, tokenizer) if asked else None
        content = shape.full(answer)
        if token_ids:
            content |= {"token_ids": answer.tokens, "prompt_token_ids": list(answer.request.prompt)}
        choices.append(_choice(index, content, answer, logprobs))
    return head.fields(shape.whole) | {"choices": choices, "usage": usage(answers)} | metrics_field(head, answers)


def opening_chunk(head: Head, shape: Shape, index: int) -> dict[str, Any] | None:
    """The chunk before any text of a choice, where the endpoint has one."""
    opening = shape.opening()
    return None if opening is None else _chunk(head, shape, _choice(index, opening, None))


def text_chunk(
    head: Head, shape: Shape, index: int, answer: Answer, piece: Piece, tokenizer: Tokenizer, *, token_ids: bool
) -> dict[str, Any]:
    """A chunk with more text of a choice, or with the scores of tokens whose text is held back."""
    logprobs = shape.logprobs(piece.scores, tokenizer) if piece.scores else None
    content = shape.piece(piece, len(answer.calls) - len(piece.calls))
    if token_ids:
        content |= {"token_ids": list(piece.tokens)}
    return _chunk(head, shape, _choice(index, content, None, logprobs))


def last_chunk(head: Head, shape: Shape, index: int, answer: Answer) -> dict[str, Any]:
    """The chunk that says why a choice ended."""
    return _chunk(head, shape, _choice(index, shape.piece(Piece("", []), 0), answer))


def usage_chunk(head: Head, shape: Shape, answers: Sequence[Answer]) -> dict[str, Any]:
    """The chunk without choices that ends a stream whose client asked for usage."""
    return head.fields(shape.chunk) | {"choices": [], "usage": usage(answers)} | metrics_field(head, answers)


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of all sequences so far; a prompt counts once however many answers it gets.

    completion_tokens are those that were sent, rejected drafts and predictions never among them.
    """
    prompt = sum(len(answer.request.prompt) for answer in answers if answer.request.branch == 0)
    completion = sum(len(answer.tokens) for answer in answers)
    ended = [answer.stats for answer in answers if answer.stats is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},  # no prompt outlives its request here
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(stats.accepted_prediction_tokens for stats in ended),
            "rejected_prediction_tokens": sum(stats.rejected_prediction_tokens for stats in ended),
        },
    }


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
        "mean_itl_ms": None if rate is None else round(1000 / rate, 3),
        "tokens_per_second": None if rate is None else round(rate, 3),
    }
    speculation = _speculation(head, answer.request, stats)
    return {"metrics": numbers if speculation is None else numbers | {"speculative_decoding": speculation}}


def _speculation(head: Head, request: Request, stats: RequestStats) -> dict[str, Any] | None:
    asked = head.card.max_depth if request.depth is None else request.depth
    longest = max(asked, len(stats.histogram) - 1)
    if longest == 0:
        return None
    steps = sum(stats.histogram)
    rule = head.rule if request.rule is None else request.rule
    return {
        "mean_acceptance_length": round(1 + stats.kept_tokens / steps, 4) if steps else None,
        "draft_acceptance_rate": round(stats.kept_tokens / stats.drafted_tokens, 4) if stats.drafted_tokens else None,
        "acceptance_histogram": [*stats.histogram, *[0] * (longest + 1 - len(stats.histogram))],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.kept_tokens,
        "num_draft_tokens": stats.drafted_tokens,
        "num_spec_tokens": longest,
        "rule": rule,
        "lossless": head.card.rules.get(rule),
        "source": head.card.speculator if request.source is None else request.source,
    }


def _choice(
    index: int, content: dict[str, Any], ended: Answer | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    reason = None if ended is None else ended.reason
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
