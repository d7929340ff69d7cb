"""A structured specification crosses the wire as itself or not at all."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from specserve.errors import ProtocolError
from specserve.transport.messages import Open, pack, unpack
from specserve.types import Sampling, Structured


def frames(structured: Structured | None) -> list[bytes]:
    message = Open(1, 0, np.array([1], dtype=np.int32), 1, Sampling(0.0), (), "exact", 0, structured=structured)
    return [bytes(frame) for frame in pack(message)]


@pytest.mark.parametrize(
    "structured", [None, Structured("json_object"), Structured("regex", "é+"), Structured("grammar")]
)
def test_a_specification_survives_the_wire(structured: Structured | None) -> None:
    """Kind and text are what was sent."""
    found = unpack(frames(structured))
    assert isinstance(found, Open)
    assert found.structured == structured


@pytest.mark.parametrize(
    "damaged",
    [
        ["regex", 5],
        ["xml", ""],
        ["a"],
        ["regex", "a", 1],
        {"kind": "regex", "spec": "a"},
        "regex",
        [],
    ],
)
def test_anything_else_is_a_protocol_error(damaged: object) -> None:
    """Unknown kinds, wrong types, missing and additional fields."""
    head, *rest = frames(Structured("regex", "a"))
    data = msgpack.unpackb(head) | {"structured": damaged}
    with pytest.raises(ProtocolError):
        unpack([msgpack.packb(data), *rest])
