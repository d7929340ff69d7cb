"""A model's own chat template: conversations to text, and how it writes the calls of tools.

Templates are rendered by transformers' sandboxed Jinja environment, imported at the first conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specserve.errors import RequestError

Messages = Sequence[Mapping[str, Any]]

_NAMES: Final = ("probe_alpha", "probe_omega")
_ARGUMENTS: Final = ({"probe_key": "probe_first"}, {"probe_key": "probe_second"})
"""Two calls that no template holds by itself."""

_TOOLS: Final = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
    for name in _NAMES
]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are spelt: opening call (separator call)* closing, where a call is head name middle arguments tail.

    opening may be empty. separator is None where an answer can hold one call only.
    """

    opening: str
    head: str
    middle: str
    tail: str
    separator: str | None
    closing: str


class ChatTemplate:
    """One template, with the special tokens that it may use by name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens

    @property
    def takes_tools(self) -> bool:
        """Whether it shows tools to the model."""
        return re.search(r"\btools\b", self._source) is not None

    @property
    def takes_calls(self) -> bool:
        """Whether it shows the calls of earlier turns."""
        return re.search(r"\btool_calls\b", self._source) is not None

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        generation: bool = True,
    ) -> str:
        """The text of a conversation, up to where the assistant's answer begins if `generation`.

        options are variables of the template's own. Raises RequestError when the template refuses.
        """
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._special_tokens, **(options or {})}
        try:
            rendered, _ = render_jinja_template(
                [list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=self._source,
                add_generation_prompt=generation,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RequestError(f"the model's chat template refused the messages: {error}", param="messages") from None
        text: str = rendered[0]
        return text

    def call_format(self) -> CallFormat | None:
        """How the template writes calls, read off two that it is given to write.

        None where it takes no tools, or writes calls in another way than as JSON objects with a name and arguments.
        """
        if not (self.takes_tools and self.takes_calls):
            return None
        try:
            return self._probed()
        except RequestError:
            return None

    def _probed(self) -> CallFormat | None:
        start = self.render(_turns(0), _TOOLS)
        one = _answer(start, self.render(_turns(1), _TOOLS, generation=False))
        first = _call_in(one, 0)
        if first is None:
            return None
        before, after = one[: first.start], one[first.end :]
        separator = self._separator(start, len(before))
        opening = before if separator is None else _shared_end(before, separator) or before
        return CallFormat(opening.lstrip(), first.head, first.middle, first.tail, separator, after)

    def _separator(self, start: str, place: int) -> str | None:
        """What stands between two calls; None where the template refuses two."""
        try:
            two = _answer(start, self.render(_turns(2), _TOOLS, generation=False))
        except RequestError:
            return None
        first, second = _call_in(two, 0), _call_in(two, 1)
        return two[first.end : second.start] if first and second and first.start == place else None


@dataclass(frozen=True, slots=True)
class _Call:
    """Where a probe's JSON object lies in a text, and its parts."""

    start: int
    end: int
    head: str
    middle: str
    tail: str


def _turns(calls: int) -> list[dict[str, Any]]:
    """A question, and an answer of so many calls."""
    asked = {"role": "user", "content": "probe"}
    if not calls:
        return [asked]
    made = [
        {"id": f"probe0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(zip(_NAMES[:calls], _ARGUMENTS, strict=False))
    ]
    return [asked, {"role": "assistant", "content": "", "tool_calls": made}]


def _answer(start: str, whole: str) -> str:
    """The assistant's part of a conversation that begins with `start`, as far as both agree."""
    return whole[_agreeing(start, whole) :]


def _call_in(text: str, number: int) -> _Call | None:
    """The JSON object around a probe's name: the name first, the arguments last."""
    place = text.rfind(_NAMES[number])
    for start in (match.start() for match in re.finditer(r"\{", text[:place])):
        try:
            found, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        if end > place and list(found.values()) == [_NAMES[number], _ARGUMENTS[number]]:
            return _parted(text, start, end, _NAMES[number])
    return None


def _parted(text: str, start: int, end: int, name: str) -> _Call:
    spelt = text[start:end]
    behind = spelt.index(name) + len(name)
    arguments = spelt.index("{", behind)
    _, after = json.JSONDecoder().raw_decode(spelt, arguments)
    return _Call(start, end, spelt[: behind - len(name)], spelt[behind:arguments], spelt[after:])


def _shared_end(one: str, other: str) -> str:
    shared = one[len(one) - _agreeing(one[::-1], other[::-1]) :]
    return shared if shared.strip() else ""


def _agreeing(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
