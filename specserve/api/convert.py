"""From a checked body to `types.Request`. Pure: no engine, no clock, no randomness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specserve.api.schemas import ChatBody, CompletionBody, Generation, Message
from specserve.api.structured import structured_of
from specserve.config import Config
from specserve.errors import ContextLengthExceeded, InvalidField, ModelNotFound, UnsupportedField
from specserve.types import ModelCard, Request, RequestId, Sampling

Prompt = str | list[int]
"""A prompt as it was sent: text, or token ids."""

MAX_PROMPTS = 1024

_ROLES = {
    "system": "system",
    "developer": "system",  # templates know the older word
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def check_model(name: str | None, card: ModelCard) -> None:
    """Raise ModelNotFound unless the served model, or none, was asked for."""
    if name is not None and name != card.name:
        raise ModelNotFound(f"the model does not exist here; this server has {card.name!r}", param="model")


def check_options(body: Generation) -> None:
    """Raise InvalidField for options that only make sense together with others."""
    if body.stream_options is not None and not body.stream:
        raise InvalidField("stream_options: only allowed when stream is true", param="stream_options")


def messages_of(body: ChatBody) -> list[dict[str, Any]]:
    """The conversation as a chat template takes it: role and plain text. Text parts are joined by newlines."""
    return [_message(message, f"messages.{index}") for index, message in enumerate(body.messages)]


def prompts_of(body: CompletionBody, config: Config) -> list[Prompt]:
    """The one or more prompts of a completion.

    Raises InvalidField for anything but a text, a list of ids, or a list of either, for empty ones, and for more
    prompts than could ever wait and run here at once.
    """
    prompts = _prompt_list(body.prompt)
    most = min(MAX_PROMPTS, config.engine.max_requests + config.engine.queue_limit)
    if len(prompts) > most:
        raise InvalidField(f"prompt: {len(prompts)} prompts in one request, at most {most} are allowed", param="prompt")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidField(f"prompt: prompt {index} is empty", param="prompt")
    return prompts


def answer_limit(body: Generation, config: Config) -> int | None:
    """The answer length asked for in tokens, or the endpoint's default; None is the rest of the context."""
    if isinstance(body, ChatBody):
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return config.server.default_max_tokens if body.max_tokens is None else body.max_tokens


def to_request(
    body: Generation,
    prompt: Sequence[int],
    card: ModelCard,
    config: Config,
    *,
    request_id: str,
    seed: int,
) -> Request:
    """One sequence for the engine. `seed` is used when the client gave none.

    Raises InvalidField for token ids outside the vocabulary, ContextLengthExceeded when the prompt alone or
    max_tokens alone does not fit. When only their sum does not, the answer is cut to what fits.
    """
    _check_ids(prompt, card.vocab_size, "prompt")
    _check_ids(body.stop_token_ids or (), card.vocab_size, "stop_token_ids")
    return Request(
        id=RequestId(request_id),
        prompt=tuple(prompt),
        max_tokens=_room(len(prompt), answer_limit(body, config), card.context_length),
        sampling=_sampling(body),
        seed=body.seed if body.seed is not None else seed,
        stop=_stops(body.stop, config),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        depth=_depth(body, card),
        structured=structured_of(body.response_format, body.structured_outputs),
    )


def _message(message: Message, where: str) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise InvalidField(f"{where}.role: must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    if message.tool_calls:
        raise UnsupportedField("tool_calls are not supported by this server", param=f"{where}.tool_calls")
    return {"role": _ROLES[message.role], "content": _content(message, f"{where}.content")}


def _content(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None and message.role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        raise InvalidField(f"{where}: must be a text or a list of text parts", param=where)
    return "\n".join(_part(part, f"{where}.{index}") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidField(f"{where}: must be an object with a type", param=where)
    if part["type"] != "text":
        raise UnsupportedField(f"{where}: only parts of type text are supported, not {part['type']!r}", param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidField(f"{where}.text: must be a text", param=f"{where}.text")
    return str(part["text"])


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


def _check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise InvalidField(f"{field}: token ids must lie between 0 and {vocab_size - 1}", param=field)


def _room(prompt: int, asked: int | None, context: int) -> int:
    limit = f"This model's maximum context length is {context} tokens."
    if prompt == 0:
        raise InvalidField("prompt: holds no tokens", param="prompt")
    if prompt >= context:
        raise ContextLengthExceeded(f"{limit} The prompt has {prompt} tokens and leaves no room.", param="prompt")
    if asked is not None and asked > context:
        # A number of any length may have been sent; it is not echoed.
        raise ContextLengthExceeded(f"{limit} max_tokens asks for more than that.", param="max_tokens")
    return context - prompt if asked is None else min(asked, context - prompt)


def _sampling(body: Generation) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        top_k=max(0, body.top_k or 0),
    )


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


def _depth(body: Generation, card: ModelCard) -> int | None:
    speculation = body.speculation
    if speculation is None:
        return None
    if speculation.depth is not None and speculation.depth > card.max_depth:
        raise InvalidField(f"speculation.depth: at most {card.max_depth} here", param="speculation.depth")
    return 0 if speculation.enabled is False else speculation.depth
