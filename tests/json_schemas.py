"""Random JSON schemas whose answers always end: every string, number, array and object in them is bounded."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """A schema of scalars, and of arrays and objects down to `depth` levels of them."""
    makers = [_string, _integer, _constant, _formatted, _either]
    if depth:
        makers += [_array, _object, _object, _object]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> Schema:
    most = rng.randint(0, 8)
    return {"type": "string", "minLength": rng.randint(0, most), "maxLength": most}


def _integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 500)}


def _constant(rng: random.Random, depth: int) -> Schema:
    values = ["", "a", 'q"\\', "é日", 0, -7, 2.5, True, None, [1, "x"], {"k": []}]
    return {"enum": rng.sample(values, rng.randint(1, 4))} if rng.random() < 0.7 else {"const": rng.choice(values)}


def _formatted(rng: random.Random, depth: int) -> Schema:
    patterns = ["^[a-f]{1,4}$", "^(x|yy)-[0-9]{2}$", r"^\d{1,3}(\.\d)?$"]
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": rng.choice(patterns)}])


def _either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, max(0, depth - 1)) for _ in range(rng.randint(2, 3))]}


def _array(rng: random.Random, depth: int) -> Schema:
    most = rng.randint(0, 3)
    items = random_schema(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": rng.randint(0, most), "maxItems": most}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["a", "id", "größe", "first name", "x_1", "t"], rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
