"""From a checked body to `types.Request`. Pure: no engine, no clock, no randomness."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from specserve.api.schemas import ChatBody, CompletionBody, Generation
from specserve.api.speculation import wish_of
from specserve.config import Config
from specserve.errors import ContextLengthExceeded, InvalidField, ModelNotFound, UnsupportedField
from specserve.text import Tokenizer
from specserve.types import ModelCard, Request, RequestId, Sampling, Structured

Prompt = str | list[int]
"""A prompt as it was sent: text, or token ids."""

MAX_BAD_WORD = 256
MAX_BIAS = 100.0
MAX_DIGITS = 10

TIMEOUT_HEADER = "X-Request-Timeout"
"""Header with the seconds that an answer may take, for clients that cannot set `timeout_s` in the body."""

_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def check_model(name: str | None, card: ModelCard) -> None:
    """Raise ModelNotFound unless the served model, or none, was asked for."""
    if name is not None and name != card.name:
        raise ModelNotFound(f"the model does not exist here; this server has {card.name!r}", param="model")


def check_options(body: Generation, config: Config) -> None:
    """Raise InvalidField for options that only make sense together with others, UnsupportedField for best_of > n."""
    if body.stream_options is not None and not body.stream:
        raise InvalidField("stream_options: only allowed when stream is true", param="stream_options")
    if body.n is not None and body.n > config.server.max_n:
        raise InvalidField(f"n: at most {config.server.max_n} here", param="n")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise InvalidField("top_logprobs: only allowed when logprobs is true", param="top_logprobs")
    if (_logprobs(body) or 0) > config.server.max_logprobs:
        name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        raise InvalidField(f"{name}: at most {config.server.max_logprobs} here", param=name)
    if isinstance(body, CompletionBody):
        if body.max_tokens == 0 and not body.echo:
            raise InvalidField("max_tokens: must be at least 1 unless echo is true", param="max_tokens")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise UnsupportedField("best_of is not supported by this server unless it equals n", param="best_of")


def time_limit(body: Generation, headers: Mapping[str, str], config: Config) -> float:
    """Seconds that the answer may take: the least of what body, header and server allow.

    Raises InvalidField for a header that is no positive number of seconds.
    """
    asked = [config.server.request_timeout_s]
    if body.timeout_s is not None:
        asked.append(body.timeout_s)
    text = headers.get(TIMEOUT_HEADER)
    if text is not None:
        asked.append(_seconds(text))
    return min(asked)


def _seconds(text: str) -> float:
    match = _SECONDS.fullmatch(text.strip())
    seconds = float(match[0]) if match else 0.0
    if seconds <= 0:
        raise InvalidField(f"the header {TIMEOUT_HEADER} must be a number of seconds above 0", param=TIMEOUT_HEADER)
    return seconds


def prompts_of(body: CompletionBody, config: Config) -> list[Prompt]:
    """The one or more prompts of a completion.

    Raises InvalidField for anything but a text, a list of ids, or a list of either, for empty ones, and for more
    prompts than could ever wait and run here at once.
    """
    prompts = _prompt_list(body.prompt)
    branches = body.n or 1
    most = min(config.server.max_prompts, config.engine.max_requests + config.engine.queue_limit) // branches
    if len(prompts) > most:
        raise InvalidField(
            f"prompt: {len(prompts)} prompts in one request, at most {most} are allowed with n = {branches}",
            param="prompt",
        )
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidField(f"prompt: prompt {index} is empty", param="prompt")
    return prompts


def answer_limit(body: Generation, config: Config) -> int | None:
    """The answer length asked for in tokens, or the endpoint's default; None is the rest of the context."""
    if isinstance(body, ChatBody):
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return config.server.default_max_tokens if body.max_tokens is None else body.max_tokens


def check_size(text: str, tokenizer: Tokenizer, card: ModelCard, param: str) -> None:
    """Raise ContextLengthExceeded for a text that cannot fit whatever its tokens are, without encoding it."""
    if not tokenizer.may_fit(text, card.context_length):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.context_length} tokens, but a text of {len(text)} "
            f"characters is longer than that in any case; shorten it",
            param=param,
        )


def to_request(
    body: Generation,
    prompt: Sequence[int],
    card: ModelCard,
    config: Config,
    *,
    request_id: str,
    seed: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    prediction: Sequence[int] = (),
    structured: Structured | None = None,
) -> Request:
    """One sequence for the engine. `seed` is used when the client gave none; bad_words and prediction are the body's,
    as tokens; structured is what the answer is held to.

    Raises InvalidField for token ids outside the vocabulary, ContextLengthExceeded when the prompt alone or
    max_tokens alone does not fit. When only their sum does not, the answer is cut to what fits.
    """
    prompt_field = "messages" if isinstance(body, ChatBody) else "prompt"
    check_ids(prompt, card.vocab_size, prompt_field)
    check_ids(body.stop_token_ids or (), card.vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids or (), card.vocab_size, "allowed_token_ids")
    _check_prediction(prediction, card)
    wish = wish_of(body, card)
    max_tokens = _room(len(prompt), answer_limit(body, config), card.context_length, prompt_field)
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidField(f"min_tokens: must not be above max_tokens ({max_tokens})", param="min_tokens")
    return Request(
        id=RequestId(request_id),
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=_sampling(body, card, config, bad_words),
        seed=body.seed if body.seed is not None else seed,
        stop=_stops(body.stop, config),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        depth=wish.depth,
        rule=wish.rule,
        source=wish.source,
        prediction=tuple(prediction),
        logprobs=_logprobs(body),
        prompt_logprobs=body.logprobs if isinstance(body, CompletionBody) and body.echo else None,
        structured=structured,
        cache_salt=body.cache_salt or "",
        patient=not body.stream,
    )


def bad_words_of(body: Generation, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of the body's bad words, each at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in body.bad_words or ():
        text = word.lstrip()
        if not text or len(word) > MAX_BAD_WORD:
            raise InvalidField(
                f"bad_words: each must have 1 to {MAX_BAD_WORD} characters that are not all space", param="bad_words"
            )
        for spelling in (text, f" {text}"):
            found[tuple(tokenizer.encode(spelling, special=False))] = None
    return tuple(word for word in found if word)


def _prompt_list(prompt: object) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidField(
            "prompt: must be a text, a list of token ids, or a list of either; not empty", param="prompt"
        )
    if all(_is_id(item) for item in prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if all(isinstance(item, list) and all(_is_id(token) for token in item) for item in prompt):
        return list(prompt)
    raise InvalidField(
        "prompt: a list must hold only texts, only token ids, or only lists of token ids", param="prompt"
    )


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise InvalidField unless all ids are in the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise InvalidField(f"{field}: token ids must lie between 0 and {vocab_size - 1}", param=field)


def _check_prediction(prediction: Sequence[int], card: ModelCard) -> None:
    if len(prediction) > card.context_length:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.context_length} tokens. The prediction has "
            f"{len(prediction)}.",
            param="prediction",
        )


def _room(prompt: int, asked: int | None, context: int, prompt_field: str) -> int:
    limit = f"This model's maximum context length is {context} tokens."
    if prompt == 0:
        raise InvalidField(f"{prompt_field}: holds no tokens", param=prompt_field)
    if prompt >= context:
        raise ContextLengthExceeded(f"{limit} The prompt has {prompt} tokens and leaves no room.", param=prompt_field)
    if asked is not None and asked > context:
        # A number of any length may have been sent; it is not echoed.
        raise ContextLengthExceeded(f"{limit} max_tokens asks for more than that.", param="max_tokens")
    return context - prompt if asked is None else min(asked, context - prompt)


def _sampling(body: Generation, card: ModelCard, config: Config, bad_words: tuple[tuple[int, ...], ...]) -> Sampling:
    usual = card.sampling if config.server.sampling_defaults == "model" else Sampling()
    allowed = body.allowed_token_ids
    return Sampling(
        temperature=usual.temperature if body.temperature is None else float(body.temperature),
        top_p=usual.top_p if body.top_p is None else float(body.top_p),
        top_k=usual.top_k if body.top_k is None else max(0, body.top_k),
        min_p=usual.min_p if body.min_p is None else float(body.min_p),
        repetition_penalty=(
            usual.repetition_penalty if body.repetition_penalty is None else float(body.repetition_penalty)
        ),
        presence_penalty=float(body.presence_penalty or 0),
        frequency_penalty=float(body.frequency_penalty or 0),
        logit_bias=tuple(_bias(item, card.vocab_size) for item in (body.logit_bias or {}).items()),
        min_tokens=body.min_tokens or 0,
        bad_words=bad_words,
        allowed_token_ids=None if allowed is None else tuple(allowed),
    )


def _bias(item: tuple[str, float], vocab_size: int) -> tuple[int, float]:
    """A token id and its bias, which is clamped to what OpenAI allows. Raises InvalidField for another key."""
    key, value = item
    if not (key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS and int(key) < vocab_size):
        raise InvalidField(
            f"logit_bias: keys must be token ids between 0 and {vocab_size - 1}, written as digits", param="logit_bias"
        )
    return int(key), max(-MAX_BIAS, min(MAX_BIAS, float(value)))


def _logprobs(body: Generation) -> int | None:
    """How many alternatives each token is reported with; None reports nothing."""
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionBody) else None


def _stops(stop: object, config: Config) -> tuple[str, ...]:
    server = config.server
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidField("stop: must be a text or a list of texts", param="stop")
    if len(texts) > server.max_stop_strings:
        raise InvalidField(f"stop: at most {server.max_stop_strings} texts are allowed", param="stop")
    if not all(0 < len(text) <= server.max_stop_length for text in texts):
        raise InvalidField(f"stop: each text must have 1 to {server.max_stop_length} characters", param="stop")
    return tuple(texts)
