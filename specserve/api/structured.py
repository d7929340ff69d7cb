"""`response_format` and `structured_outputs`: what a client asks an answer to be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from specserve.errors import InvalidField, UnsupportedField
from specserve.types import Structured

CheckStructured = Callable[[Structured], None]
"""Compiles a specification in bounded time. Raises a RequestError that says why it cannot be served."""

_FORMAT = "response_format"
_OUTPUTS = "structured_outputs"
_FORMAT_KEYS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
}
_SCHEMA_KEYS = {"name", "schema", "strict", "description"}


def structured_of(response_format: object, structured_outputs: object) -> Structured | None:
    """What the two fields of a body ask for together; null asks for nothing.

    Raises InvalidField for anything malformed or contradictory, UnsupportedField for kinds that are not served.
    """
    formatted = None if response_format is None else _of_format(_mapping(response_format, _FORMAT))
    outputs = None if structured_outputs is None else _of_outputs(_mapping(structured_outputs, _OUTPUTS))
    if formatted is not None and outputs is not None:
        raise InvalidField(f"{_OUTPUTS}: cannot go with a {_FORMAT} of its own; send one of them", param=_OUTPUTS)
    return formatted or outputs


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidField(f"{where}: must be an object", param=where)
    return value


def _of_format(value: Mapping[str, object]) -> Structured | None:
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise InvalidField(f"{_FORMAT}.type: must be one of {', '.join(_FORMAT_KEYS)}", param=f"{_FORMAT}.type")
    _only(value, _FORMAT_KEYS[kind], _FORMAT)
    if kind == "json_schema":
        return _of_schema(_mapping(value.get("json_schema"), f"{_FORMAT}.json_schema"))
    return None if kind == "text" else Structured("json_object")


def _of_schema(value: Mapping[str, object]) -> Structured:
    where = f"{_FORMAT}.json_schema"
    _only(value, _SCHEMA_KEYS, where)
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise InvalidField(f"{where}.name: must be a text", param=f"{where}.name")
    if not isinstance(value.get("strict", None), bool | None):
        raise InvalidField(f"{where}.strict: must be true or false", param=f"{where}.strict")
    return _json(value.get("schema"), f"{where}.schema")


def _json(schema: object, where: str) -> Structured:
    if not isinstance(schema, dict):
        raise InvalidField(f"{where}: must be a JSON schema, as an object", param=where)
    return Structured("json_schema", json.dumps(schema, ensure_ascii=False))


def _of_outputs(value: Mapping[str, object]) -> Structured | None:
    asked = {name: item for name, item in value.items() if item is not None}
    for name in asked.keys() - _READERS.keys():
        raise UnsupportedField(
            f"{_OUTPUTS}.{name}: not supported; there are {', '.join(_READERS)}", param=f"{_OUTPUTS}.{name}"
        )
    if len(asked) != 1:
        raise InvalidField(f"{_OUTPUTS}: must hold exactly one of {', '.join(_READERS)}", param=_OUTPUTS)
    ((name, item),) = asked.items()
    return _READERS[name](item, f"{_OUTPUTS}.{name}")


def _regex(value: object, where: str) -> Structured:
    return Structured("regex", _text(value, where))


def _grammar(value: object, where: str) -> Structured:
    return Structured("grammar", _text(value, where))


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidField(f"{where}: must be a text, not empty", param=where)
    return value


def _choice(value: object, where: str) -> Structured:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise InvalidField(f"{where}: must be a list of texts, none of them empty", param=where)
    return Structured("choice", json.dumps(value, ensure_ascii=False))


def _only(value: Mapping[str, object], known: set[str], where: str) -> None:
    for name in value.keys() - known:
        raise InvalidField(f"{where}.{name}: not a field here; there are {', '.join(sorted(known))}", param=where)


_READERS: Mapping[str, Callable[[object, str], Structured]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
