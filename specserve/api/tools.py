"""Tool calling: what a client offers, the grammar that holds the answer to it, and the calls read out of the text.

The answer is held to the form in which the model's own chat template writes calls: with `auto` it is any text without a
call, or text and then calls; with `required` or a named function it is calls only. Arguments follow each function's
JSON schema. So a call that begins is always one that can be made.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specserve.errors import InvalidField, UnsupportedField
from specserve.templates import CallFormat
from specserve.types import Structured

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHOICES: Final = ("none", "auto", "required")
_EMPTY: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_ENFORCED: Final = {"whitespace_flexible": True, "whitespace_pattern": r" |\n {0,20}", "lenient": False}
"""As for `response_format`: bounded white space, and keywords that cannot be enforced are refused."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What one request offers. shown is for the template; structured holds the answer to the form of calls."""

    shown: Sequence[Mapping[str, Any]]
    format: CallFormat
    structured: Structured


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model made; arguments are JSON text, cut short where the answer was."""

    id: str
    name: str
    arguments: str

    def fields(self) -> dict[str, Any]:
        """As OpenAI spells it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def tools_of(
    tools: object, tool_choice: object, parallel: bool | None, found: CallFormat | None, most: int
) -> Tools | None:
    """What a body's fields ask for; None where no tool is offered, or none may be called.

    found is how the model writes calls, most the largest number of tools.
    Raises InvalidField for what is malformed, UnsupportedField where the model has no way of calling tools.
    """
    schemas = {} if tools is None else _schemas(tools, most)
    names = _chosen(tool_choice, schemas)
    if not schemas or names is None:
        return None
    found = _known(found)
    offered = {name: schemas[name] for name in names}
    free = tool_choice is None or tool_choice == "auto"
    structured = Structured("grammar", _grammar(offered, found, free=free, several=parallel is not False))
    return Tools(shown_tools(tools, found, most) or [], found, structured)


def shown_tools(tools: object, found: CallFormat | None, most: int) -> list[Any] | None:
    """A body's tools as a template takes them. Raises what `tools_of` raises."""
    if tools is None:
        return None
    _schemas(tools, most)
    _known(found)
    return tools if isinstance(tools, list) else None


def _known(found: CallFormat | None) -> CallFormat:
    if found is None:
        raise UnsupportedField(
            "tools: this model's chat template has no way of calling tools that is known here", param="tools"
        )
    return found


def _schemas(tools: object, most: int) -> dict[str, Mapping[str, Any]]:
    """The parameters' schema of each function by its name."""
    if not isinstance(tools, list) or not 1 <= len(tools) <= most:
        raise InvalidField(f"tools: must be a list of 1 to {most} tools", param="tools")
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        name, schema = _function(tool, f"tools.{index}")
        if name in schemas:
            raise InvalidField(f"tools.{index}.function.name: is there already", param=f"tools.{index}.function.name")
        schemas[name] = schema
    return schemas


def _function(tool: object, where: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise InvalidField(f"{where}: must be an object of type function, with a function", param=where)
    function = tool["function"]
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidField(
            f"{where}.function.name: must be 1 to 64 letters, digits, _ or -", param=f"{where}.function.name"
        )
    if not isinstance(function.get("description", ""), str | None):
        raise InvalidField(f"{where}.function.description: must be a text", param=f"{where}.function.description")
    if schema is None:
        return name, _EMPTY
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidField(
            f"{where}.function.parameters: must be the JSON schema of an object", param=f"{where}.function.parameters"
        )
    return name, {"type": "object"} | schema


def _chosen(choice: object, schemas: Mapping[str, object]) -> list[str] | None:
    """The functions that may be called; None where none may."""
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        if choice == "required" and not schemas:
            raise InvalidField("tool_choice: required, but there are no tools", param="tool_choice")
        return None if choice == "none" else list(schemas)
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in schemas:
        raise InvalidField(
            "tool_choice: must be none, auto, required, or an object that names a function in tools",
            param="tool_choice",
        )
    return [name]


def _grammar(schemas: Mapping[str, Mapping[str, Any]], form: CallFormat, *, free: bool, several: bool) -> str:
    """A grammar in Lark's notation: calls of these functions, and, if free, text without any."""
    more = f" ({_text(form.separator)} call)*" if several and form.separator is not None else ""
    closing = f" {_text(form.closing)}" if form.closing else ""
    calls = f"call{more}{closing}"
    lines = [f"call: {' | '.join(f'call_{index}' for index in range(len(schemas)))}"]
    if not free:
        opening = f"{_text(form.opening)} " if form.opening else ""
        lines.append(f"start: {opening}{calls}")
    elif form.opening:
        # The lazy one ends with the first opening, so that calls follow it and text without one is the other.
        lines.append(f"start: TEXT? | until {calls}")
        lines.append(f"until[lazy]: /(?s:.*){_pattern(form.opening)}/")
        lines.append(f"TEXT: /(?s:.+)/ & ~/(?s:.*){_pattern(form.opening)}(?s:.*)/")
    else:
        lines.append(f"start: TEXT? | {calls}")
        lines.append(f"TEXT: /(?s:[^{_pattern(form.head[0])}].*)/")
    for index, (name, schema) in enumerate(schemas.items()):
        head = form.head + name + form.middle
        lines.append(f"call_{index}: {_text(head)} args_{index} {_text(form.tail)}")
        lines.append(f"args_{index}: %json {json.dumps(dict(schema) | {'x-guidance': _ENFORCED})}")
    return "\n".join(lines)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)


class CallReader:
    """Splits the growing text of an answer into what is said and which calls are made, each as soon as it is whole."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._marker = form.opening or form.head
        self._held = ""
        self._begun = False  # something was said
        self._calling = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text to show now, and the calls that this text completed."""
        self._held += text
        said = "" if self._calling else self._said()
        calls: list[ToolCall] = []
        while self._calling and "}" in text and (call := self._call()) is not None:
            calls.append(call)
        return said, calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """What is left at the end: text that was held back, or a call that the end of the answer cut short."""
        held, self._held = self._held, ""
        if not self._calling:
            return held, []
        name, arguments = self._name(held)
        return "", [] if name is None else [_made(name, held[arguments:])]

    def _said(self) -> str:
        """Text up to the first call, without what may yet become one."""
        place = self._held.find(self._marker)
        if place >= 0 and (self._form.opening or (place == 0 and not self._begun)):
            self._calling = True
            said, self._held = self._held[:place], self._held[place + len(self._form.opening) :]
            return said
        keep = self._may_begin() if self._form.opening or not self._begun else 0
        said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._begun |= bool(said)
        return said

    def _may_begin(self) -> int:
        """How many characters at the end may be the beginning of the marker; where calls come first, all or none."""
        if not self._form.opening:
            return len(self._held) if self._marker.startswith(self._held) else 0
        longest = min(len(self._held), len(self._marker) - 1)
        return next((size for size in range(longest, 0, -1) if self._held.endswith(self._marker[:size])), 0)

    def _call(self) -> ToolCall | None:
        name, arguments = self._name(self._held)
        if name is None:
            return None
        try:
            _, end = json.JSONDecoder().raw_decode(self._held, arguments)
        except ValueError:
            return None
        if not self._held.startswith(self._form.tail, end):
            return None
        call = _made(name, self._held[arguments:end])
        self._held = self._held[end + len(self._form.tail) :]
        return call

    def _name(self, text: str) -> tuple[str | None, int]:
        """The name of the call that begins next, and where its arguments begin."""
        head = text.find(self._form.head)
        begin = head + len(self._form.head)
        middle = text.find(self._form.middle, begin)
        if head < 0 or middle < 0:
            return None, 0
        return text[begin:middle], middle + len(self._form.middle)


def _made(name: str, arguments: str) -> ToolCall:
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, arguments)
