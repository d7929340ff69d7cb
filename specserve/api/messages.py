"""A conversation as clients send it, and as chat templates take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from reprlib import repr as shortened
from typing import Any

from pydantic import ValidationError

from specserve.api.body import parse_object
from specserve.api.schemas import Conversation, Message, field_error
from specserve.errors import InvalidField, RequestError, UnsupportedField

_ROLES = {
    "system": "system",
    "developer": "system",  # templates know the older word
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
)
"""Variables of a template that a request may not set by itself."""


def messages_of(messages: Sequence[Message], *, takes_calls: bool) -> list[dict[str, Any]]:
    """Role and plain text of each turn, and the calls of tools. Text parts are joined by newlines.

    takes_calls: the model's template shows calls. Raises InvalidField, and UnsupportedField for what is not text.
    """
    return [_message(message, f"messages.{index}", takes_calls=takes_calls) for index, message in enumerate(messages)]


def conversation_of(given: object, *, takes_calls: bool) -> list[dict[str, Any]]:
    """The same for what a program gives, which no schema has looked at.

    Raises InvalidField for what is no conversation, and for the rest as `messages_of` does.
    """
    plain: object = given
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        plain = list(given)
    try:
        body = Conversation.model_validate({"messages": plain})
    except ValidationError as error:
        wrong = field_error(error)
        raise InvalidField(
            f'{wrong.message}; a conversation is a list such as [{{"role": "user", "content": "Hello"}}], '
            f"found {shortened(given)}",
            param=wrong.param,
        ) from None
    return messages_of(body.messages, takes_calls=takes_calls)


def text_of(content: object, where: str) -> str:
    """A text, or text parts joined by newlines. Raises InvalidField, and UnsupportedField for other parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidField(f"{where}: must be a text or a list of text parts", param=where)
    return "\n".join(_part(part, f"{where}.{index}") for index, part in enumerate(content))


def template_options(kwargs: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Variables of the template's own. Raises InvalidField for those that are not a client's to set."""
    for name in kwargs or {}:
        if name in _TEMPLATE_NAMES or name.endswith("_token") or not name.isidentifier():
            raise InvalidField("chat_template_kwargs: holds a name that is not to be set", param="chat_template_kwargs")
    return dict(kwargs or {}) | ({} if effort is None else {"reasoning_effort": effort})


def _message(message: Message, where: str, *, takes_calls: bool) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise InvalidField(f"{where}.role: must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    turn: dict[str, Any] = {"role": _ROLES[message.role], "content": _content(message, f"{where}.content")}
    if message.tool_calls:
        if not takes_calls:
            raise UnsupportedField(
                f"{where}.tool_calls: this model's chat template has no place for tool calls",
                param=f"{where}.tool_calls",
            )
        turn["tool_calls"] = _calls(message, f"{where}.tool_calls")
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return turn | {key: value for key, value in named.items() if value is not None}


def _content(message: Message, where: str) -> str:
    if message.content is None and message.role == "assistant":
        return ""
    return text_of(message.content, where)


def _calls(message: Message, where: str) -> list[dict[str, Any]]:
    if message.role != "assistant" or not isinstance(message.tool_calls, list):
        raise InvalidField(f"{where}: must be a list, in a message of the assistant", param=where)
    return [_call(call, f"{where}.{index}") for index, call in enumerate(message.tool_calls)]


def _call(call: object, where: str) -> dict[str, Any]:
    """A call with its arguments as an object, as templates take them."""
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidField(f"{where}: must be a call of a function with a name", param=where)
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    shown = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": shown}


def _arguments(text: object, where: str) -> dict[str, Any]:
    if text is None or text == "":
        return {}
    wrong = InvalidField(f"{where}: must be a JSON object as text", param=where)
    if not isinstance(text, str):
        raise wrong
    try:
        return parse_object(text.encode())
    except RequestError:
        raise wrong from None


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidField(f"{where}: must be an object with a type", param=where)
    if part["type"] != "text":
        raise UnsupportedField(f"{where}: only parts of type text are supported, not {part['type']!r}", param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidField(f"{where}.text: must be a text", param=f"{where}.text")
    return str(part["text"])
