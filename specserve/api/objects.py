"""OpenAI's objects: whole answers and chunks, usage, and what speculation did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specserve.api.answers import Answer, Piece
from specserve.api.shapes import Shape
from specserve.text import Tokenizer
from specserve.types import ModelCard, Request, RequestStats, RuleName


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
    # Several answers to one prompt read it once: the first one's reading is what was cached or not.
    cached = sum(each.stats.cached_tokens for each in answers if each.stats is not None and not each.request.branch)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
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
    own = "prediction" if request.prediction else head.card.speculator
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
        "source": own if request.source is None else request.source,
    }


def _choice(
    index: int, content: dict[str, Any], ended: Answer | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    reason = None if ended is None else ended.reason
    stop_reason = None if ended is None else ended.stop_reason
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop_reason}


def _chunk(head: Head, shape: Shape, choice: dict[str, Any]) -> dict[str, Any]:
    return head.fields(shape.chunk) | {"choices": [choice]}


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
