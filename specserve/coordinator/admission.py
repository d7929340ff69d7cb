"""What is refused before a request takes a place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from numbers import Integral, Real
from reprlib import repr as shortened

from specserve.config import EngineConfig
from specserve.errors import ContextLengthExceeded, InvalidField
from specserve.types import Request, Sampling, WorkerInfo

MAX_LOGPROBS = 20
_MOST_INT32 = 2**31 - 1
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0


def check_request(request: Request, engine: EngineConfig, target: WorkerInfo) -> None:
    """Raise a RequestError when this request can never be served here."""
    _check_counts(request)
    length, context = len(request.prompt), target.context_length
    if length < 1:
        raise InvalidField("the prompt has no tokens; send at least one", param="prompt")
    if length >= context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens, but the prompt has {length}; "
            f"shorten it to at most {context - 1}",
            param="prompt",
        )
    _check_answer(request, context)
    if not all(0 <= token < target.vocab_size for token in (*request.prompt, *request.answer)):
        raise InvalidField(f"prompt token ids must be in [0, {target.vocab_size})", param="prompt")
    if request.max_tokens < 0:
        raise InvalidField(f"max_tokens must not be negative, found {request.max_tokens}", param="max_tokens")
    if request.structured is not None and request.ignore_eos:
        raise InvalidField(
            "ignore_eos cannot go with structured output: an answer whose grammar is complete must end",
            param="ignore_eos",
        )
    if request.depth is not None and not 0 <= request.depth <= engine.depth:
        raise InvalidField(
            f"depth {request.depth} is outside [0, {engine.depth}], what this deployment can do",
            param="speculation.depth",
        )
    for name, count in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise InvalidField(f"{name} must be in [0, {MAX_LOGPROBS}], found {count}", param=name)
    _check_stops(request.stop)
    _check_sampling(request.sampling, target.vocab_size)
    if not 0 <= request.sampling.min_tokens <= request.max_tokens:
        raise InvalidField(
            f"min_tokens must be in [0, max_tokens = {request.max_tokens}], found {request.sampling.min_tokens}",
            param="min_tokens",
        )
    if request.rule is not None and request.rule not in target.rules:
        raise InvalidField(
            f"no rule called {request.rule!r} here; there are: {', '.join(sorted(target.rules))}",
            param="speculation.rule",
        )


def _check_answer(request: Request, context: int) -> None:
    """An answer that goes on must have been able to."""
    length = len(request.answer)
    if length and (length >= request.max_tokens or len(request.prompt) + length >= context):
        raise InvalidField(
            f"the answer has {length} tokens already and cannot go on: max_tokens is {request.max_tokens}, the context "
            f"{context}, the prompt has {len(request.prompt)}",
            param="answer",
        )


def _check_counts(request: Request) -> None:
    """Whole numbers, as Python itself checks no types: a fraction would end a worker's round, or the coordinator."""
    counts: dict[str, object] = {
        "max_tokens": request.max_tokens,
        "speculation.depth": request.depth,
        "seed": request.seed,
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
    }
    for name, count in counts.items():
        if count is not None and not _all_are(Integral, (count,)):
            raise InvalidField(f"{name} must be a whole number, found {shortened(count)}", param=name)
    if not all(_all_are(Integral, part) for part in (request.prompt, request.answer)):
        raise InvalidField("prompts must hold whole numbers, the ids of their tokens", param="prompt")


def _check_stops(stops: Sequence[object]) -> None:
    if not all(isinstance(text, str) for text in stops):
        raise InvalidField(f"stop must hold texts, found {shortened(stops)}", param="stop")
    if not all(stops):
        raise InvalidField("an empty stop text would end every answer before it begins; leave it out", param="stop")


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Ranges and ids; a worker that met a wrong one would fail the whole batch."""
    ranges = {
        "temperature": (0.0, inf),
        "top_p": (0.0, 1.0),
        "top_k": (0, inf),
        "min_p": (0.0, 1.0),
        # Logits are divided by it: near 0 they overflow, and 0 times a masked one is no number.
        "repetition_penalty": (1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
        "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    }
    for name, (least, most) in ranges.items():
        value = getattr(sampling, name)
        if not (_all_are(Real, (value,)) and least <= value <= most and isfinite(value)):
            told = f"{name} must be a number in [{least:g}, {most:g}], found {shortened(value)}"
            raise InvalidField(told, param=name)
    for name in ("top_k", "min_tokens"):
        value = getattr(sampling, name)
        if not _all_are(Integral, (value,)):
            raise InvalidField(f"{name} must be a whole number, found {shortened(value)}", param=name)
    if sampling.top_k > _MOST_INT32:
        raise InvalidField(f"top_k must be at most {_MOST_INT32}, found {sampling.top_k}", param="top_k")
    if sampling.top_p <= 0:
        raise InvalidField(f"top_p must be above 0, found {sampling.top_p}; 1 switches it off", param="top_p")
    _check_lists(sampling)
    if not all(isfinite(value) for _, value in sampling.logit_bias):
        raise InvalidField("logit_bias values must be finite", param="logit_bias")
    if sampling.allowed_token_ids == () or () in sampling.bad_words:
        name = "bad_words" if () in sampling.bad_words else "allowed_token_ids"
        raise InvalidField(f"{name} must not be empty where it is given", param=name)
    ids = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "bad_words": [token for word in sampling.bad_words for token in word],
        "allowed_token_ids": sampling.allowed_token_ids or (),
    }
    for name, tokens in ids.items():
        if not all(0 <= token < vocab_size for token in tokens):
            raise InvalidField(f"token ids in {name} must be in [0, {vocab_size})", param=name)


def _check_lists(sampling: Sampling) -> None:
    """Raise InvalidField for what is not built as `Sampling` says: Python itself checks no types."""
    bias, words, allowed = sampling.logit_bias, sampling.bad_words, sampling.allowed_token_ids
    pairs = _is_tuple(bias) and all(_is_tuple(pair) and len(pair) == 2 for pair in bias)
    if (
        not pairs
        or not _all_are(Integral, [key for key, _ in bias])
        or not _all_are(Real, [value for _, value in bias])
    ):
        raise InvalidField(
            f"logit_bias must hold pairs of a token id and a number, such as ((5, -1.0),), found {shortened(bias)}",
            param="logit_bias",
        )
    if not _is_tuple(words) or not all(_is_tuple(word) and _all_are(Integral, word) for word in words):
        raise InvalidField(
            f"bad_words must hold sequences of token ids, such as ((5, 6),), found {shortened(words)}",
            param="bad_words",
        )
    if allowed is not None and not (_is_tuple(allowed) and _all_are(Integral, allowed)):
        raise InvalidField(
            f"allowed_token_ids must hold token ids, such as (5, 6), found {shortened(allowed)}",
            param="allowed_token_ids",
        )


def _is_tuple(value: object) -> bool:
    return isinstance(value, tuple)


def _all_are(kind: type, values: Iterable[object]) -> bool:
    """Whether all are numbers of a kind. Truth values count as none, though Python takes them for whole numbers."""
    return all(issubclass(found, kind) and found is not bool for found in set(map(type, values)))
