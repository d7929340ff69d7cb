"""The bodies that the API takes, and the fields that it refuses rather than ignores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from specserve.errors import InvalidField, UnsupportedField

_INT64 = 2**63
_SHOWN = 80

REQUEST_ID = r"^[A-Za-z0-9._-]{1,64}$"
"""What a client may call its request."""

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": ["text"]}, "text": _TEXT},
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": _TEXT, "description": _TEXT, "parameters": {"type": "object"}},
        },
    },
}
_NAMED = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
    },
}
_PREDICTION = {
    "type": "object",
    "required": ["type", "content"],
    "properties": {"type": {"enum": ["content"]}, "content": {"anyOf": [_TEXT, _PARTS]}},
}


def _either(*schemas: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(schemas)})


_NOTHING = {"type": "null"}

# What these hold is checked where it is converted, with better words than a schema's; here is what the document says.
Prompts = Annotated[Any, _either(_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}})]
Content = Annotated[Any, _either(_TEXT, _PARTS, _NOTHING)]
Stop = Annotated[Any, _either(_TEXT, {"type": "array", "items": _TEXT}, _NOTHING)]
ResponseFormat = Annotated[
    Any,
    _either(
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "required": ["name", "schema"],
                    "properties": {"name": _TEXT, "schema": {"type": "object"}},
                },
            },
        },
        _NOTHING,
    ),
]
StructuredOutputs = Annotated[
    Any,
    _either(
        {
            "type": "object",
            "properties": {
                "json": {"type": "object"},
                "regex": _TEXT,
                "choice": {"type": "array", "items": _TEXT},
                "grammar": _TEXT,
            },
        },
        _NOTHING,
    ),
]
Prediction = Annotated[Any, _either(_PREDICTION, _NOTHING)]
ToolList = Annotated[Any, _either({"type": "array", "items": _TOOL, "minItems": 1}, _NOTHING)]
ToolChoice = Annotated[Any, _either({"enum": ["none", "auto", "required"]}, _NAMED, _NOTHING)]
ToolCalls = Annotated[Any, _either({"type": "array", "items": {"type": "object"}}, _NOTHING)]


class Body(BaseModel):
    """Strict types; keys that nobody knows are left out (and counted by `unknown`)."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_origins: bool | None = None


class Speculation(Body):
    """Per-request speculation: off, or other than the deployment's. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool | None = None
    depth: int | None = Field(None, ge=0)
    rule: str | None = None
    source: str | None = None


class ModelBody(Body):
    """What names a model; the only one served is meant where it does not."""

    model: str | None = None


class Generation(ModelBody):
    """What both endpoints share. null means the default everywhere."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    min_tokens: int | None = Field(None, ge=0)
    bad_words: list[str] | None = Field(None, max_length=64)
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    n: int | None = Field(None, ge=1)
    stop: Stop = None
    stop_token_ids: list[int] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    prediction: Prediction = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    cache_salt: str | None = Field(None, max_length=256)
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)


class CompletionBody(Generation):
    """POST /v1/completions. `prompt` is a text, a list of token ids, or a list of either."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1)


class Message(Body):
    """One turn of a conversation. `content` is a text or a list of text parts."""

    role: str
    content: Content = None
    name: str | None = None
    tool_calls: ToolCalls = None
    tool_call_id: str | None = None


class Conversation(Body):
    """Turns, by whichever door they come."""

    messages: list[Message] = Field(min_length=1)


class ChatBody(Generation, Conversation):
    """POST /v1/chat/completions."""

    tools: ToolList = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)


class TokenizeBody(ModelBody):
    """POST /tokenize: a text, or a conversation in the chat template."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: ToolList = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(ModelBody):
    """POST /detokenize."""

    tokens: list[int]


IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Bookkeeping fields that change nothing here."""

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1,),
    "typical_p": (1,),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
}
"""Fields that would change the answer, each with the values that ask for nothing; null always asks for nothing.

Those that one endpoint has are unsupported at the other.
"""

_MISPLACED = frozenset({"depth", "rule", "source"})
"""Fields of `speculation`, which have no effect beside it."""


def refuse_unsupported(data: Mapping[str, object], body: type[Body]) -> None:
    """Raise UnsupportedField for the first field that asks for something this endpoint does not do, or not there."""
    for name, value in data.items():
        if name in _MISPLACED and value is not None and "speculation" in body.model_fields:
            raise UnsupportedField(
                f'{name} is a field of speculation: "speculation": {{"{name}": {json.dumps(value)[:_SHOWN]}}}',
                param=name,
            )
        if name not in _UNSUPPORTED or value is None or name in body.model_fields:
            continue
        if not any(_same(value, neutral) for neutral in _UNSUPPORTED[name]):
            raise UnsupportedField(f"{name} is not supported by this server{_hint(name)}", param=name)


_REASONS: Final = {
    "extra_forbidden": "there is no such field",
    "too_short": "must not be empty",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def field_error(error: ValidationError) -> InvalidField:
    """The first wrong field of a body; what the client sent is not echoed."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in problem["loc"]) or None
    reason = _REASONS.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    return InvalidField(f"{place or 'the body'}: {reason}", param=place)


def unknown(data: Mapping[str, object], body: type[Body]) -> list[str]:
    """The keys of a body that were ignored because nobody here knows them."""
    return [name for name in data.keys() - body.model_fields.keys() - _UNSUPPORTED.keys() - IGNORED]


def _same(value: object, neutral: object) -> bool:
    # True equals 1 in Python, yet `logprobs: 0` asks for log probabilities and `logprobs: false` does not.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _hint(name: str) -> str:
    neutral = _UNSUPPORTED[name]
    return f" with a value other than {neutral[0]!r}" if neutral else "; leave it out"
