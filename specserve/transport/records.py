"""Plain records on the wire: frozen dataclasses of numbers, texts, tuples and further records, checked by their types.

A record becomes the list of its fields' values, in order. Encoders and decoders are made once per type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from specserve.errors import ProtocolError

Coder = Callable[[Any], Any]

_ACCEPTED: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),
    str: (str,),
    bool: (bool,),
    NoneType: (NoneType,),
}


_FIELD_TYPES: dict[Any, dict[str, Any]] = {}


def field_types(kind: type[Any]) -> dict[str, Any]:
    """The resolved type of each field of a dataclass, in order."""
    known = _FIELD_TYPES.get(kind)
    if known is None:
        hints = get_type_hints(kind)
        known = _FIELD_TYPES[kind] = {each.name: hints[each.name] for each in fields(kind)}
    return known


@cache
def encoder(hint: Any) -> Coder | None:
    """What turns a value of this type into what msgpack takes; None where it is taken as it is."""
    if is_dataclass(hint):
        return _record_encoder(hint)
    if get_origin(hint) is tuple:
        parts = [encoder(part) for part in get_args(hint) if part is not Ellipsis]
        if all(part is None for part in parts):
            return None
        if get_args(hint)[-1] is not Ellipsis:
            return lambda value: [_encoded(part, item) for part, item in zip(parts, value, strict=True)]
        return lambda value: [_encoded(parts[0], item) for item in value]
    if get_origin(hint) in (Union, UnionType):
        inner = next((found for part in get_args(hint) if (found := encoder(part)) is not None), None)
        return None if inner is None else lambda value: None if value is None else inner(value)
    return None


def _record_encoder(kind: Any) -> Coder:
    parts = [(name, encoder(hint)) for name, hint in field_types(kind).items()]
    return lambda record: [_encoded(part, getattr(record, name)) for name, part in parts]


def _encoded(encode: Coder | None, value: Any) -> Any:
    return value if encode is None else encode(value)


@cache
def decoder(hint: Any) -> Coder:
    """The inverse of `encoder`. The decoder raises ProtocolError for a value that is not of the type."""
    if isinstance(hint, NewType):
        return decoder(hint.__supertype__)
    if is_dataclass(hint):
        return _record_decoder(hint)
    origin = get_origin(hint)
    if origin is Literal:
        return _choice_decoder(get_args(hint))
    if origin in (Union, UnionType):
        return _union_decoder(get_args(hint))
    if origin is tuple:
        return _tuple_decoder(get_args(hint))
    return _scalar_decoder(hint)


def _record_decoder(kind: Any) -> Coder:
    parts = [decoder(hint) for hint in field_types(kind).values()]

    def decode(data: Any) -> Any:
        return kind(*[part(item) for part, item in zip(parts, _listed(data, len(parts)), strict=True)])

    return decode


def _choice_decoder(choices: tuple[Any, ...]) -> Coder:
    def decode(data: Any) -> Any:
        if data not in choices:
            raise ProtocolError(f"{data!r} is none of {choices}")
        return data

    return decode


def _union_decoder(hints: tuple[Any, ...]) -> Coder:
    parts = [decoder(hint) for hint in hints if hint is not NoneType]
    optional = NoneType in hints

    def decode(data: Any) -> Any:
        if data is None and optional:
            return None
        for part in parts[:-1]:
            try:
                return part(data)
            except ProtocolError:
                continue
        return parts[-1](data)

    return decode


def _tuple_decoder(hints: tuple[Any, ...]) -> Coder:
    if hints[-1] is not Ellipsis:
        parts = [decoder(hint) for hint in hints]
        return lambda data: tuple(part(item) for part, item in zip(parts, _listed(data, len(parts)), strict=True))
    one = decoder(hints[0])
    plain = set(_ACCEPTED.get(hints[0], ()))

    def decode(data: Any) -> Any:
        items = _listed(data)
        return tuple(items if plain.issuperset(map(type, items)) else [one(item) for item in items])

    return decode


def _scalar_decoder(hint: Any) -> Coder:
    accepted = _ACCEPTED[hint]

    def decode(data: Any) -> Any:
        # The exact type: True is an int in Python, and not here.
        if type(data) not in accepted:
            raise ProtocolError(f"expected {hint.__name__}, found {type(data).__name__}")
        return data

    return decode


def _listed(data: Any, length: int | None = None) -> list[Any]:
    if not isinstance(data, list) or length not in (None, len(data)):
        raise ProtocolError(f"expected a list of {length or 'any number of'} values, found {type(data).__name__}")
    return data
