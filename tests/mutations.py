"""Messages that went wrong: a field of another length, type, shape or value, as a seeded chance will have it."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

_EDGES = (-(2**31), -1000, -1, 0, 1, 2, 7, 96, 97, 1000, 2**31 - 1)
_DTYPES = ("int32", "int64", "uint8", "bool", "float16", "float32")


def mutated(message: Any, chance: random.Random) -> Any:
    """The message with one field changed to something that its type allows on the wire."""
    names = [each.name for each in fields(message)]
    name = chance.choice([each for each in names if each not in ("round", "plan", "batch")] or names)
    return replace(message, **{name: _other(getattr(message, name), chance)})


def _other(value: Any, chance: random.Random) -> Any:
    if isinstance(value, np.ndarray):
        return _other_array(value, chance)
    if is_dataclass(value):
        return mutated(value, chance)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice(_EDGES)
    if isinstance(value, float):
        return chance.choice((-1.0, 0.0, float("nan"), float("inf"), 1e30))
    return value


def _other_array(array: np.ndarray, chance: random.Random) -> np.ndarray:
    way = chance.choice(("value", "value", "shorter", "longer", "empty", "dtype", "shape", "reversed"))
    if way == "value" and array.size:
        changed = array.copy()
        with np.errstate(all="ignore"):
            changed.reshape(-1)[chance.randrange(array.size)] = np.array(chance.choice(_EDGES)).astype(array.dtype)
        return changed
    if way == "shorter":
        return array[:-1]
    if way == "longer":
        return np.concatenate([array, array[:1]]) if len(array) else np.ones((1, *array.shape[1:]), array.dtype)
    if way == "dtype":
        with np.errstate(all="ignore"):
            return array.astype(chance.choice(_DTYPES))
    if way == "shape":
        return array.reshape(1, *array.shape)
    return array[:0] if way == "empty" else array[::-1].copy()
