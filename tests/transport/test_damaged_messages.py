"""Frames that went wrong on the way are a message of the declared types, or a ProtocolError; never anything else."""

from __future__ import annotations

import dataclasses
import random

import msgpack
import numpy as np
import pytest
from mutations import mutated
from test_socket import as_bytes, every_message

from specserve.errors import ProtocolError
from specserve.transport import messages as m
from specserve.transport.records import field_types

EVERY = every_message()
NAMES = [type(message).__name__ for message in EVERY]


def damaged(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """One bit, a cut, a doubled or missing frame, or a piece of the head that is something else."""
    frames = list(frames)
    place = chance.randrange(len(frames))
    frame = bytearray(frames[place])
    match chance.randrange(5):
        case 0 if frame:
            frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
            frames[place] = bytes(frame)
        case 1:
            frames[place] = bytes(frame[: chance.randrange(len(frame) + 1)])
        case 2:
            frames.insert(place, bytes(frame))
        case 3:
            del frames[place]
        case _:
            head = msgpack.unpackb(frames[0])
            head[chance.choice(list(head))] = chance.choice(
                [None, -1, 2**63, "x", [], [[]], {"a": 1}, ["int32", [2**62]]]
            )
            frames[0] = msgpack.packb(head)
    return frames


@pytest.mark.parametrize("message", EVERY, ids=NAMES)
def test_a_damaged_message_is_refused_or_of_its_types(message):
    """150 damages of each kind: no other exception, and what is let through has the types of a message."""
    for seed in range(150):
        try:
            found = m.unpack(damaged(as_bytes(message), random.Random(seed)))
        except ProtocolError:
            continue
        assert_typed(found)


FIELDS = [message for message in EVERY if dataclasses.fields(message)]


@pytest.mark.parametrize("message", FIELDS, ids=lambda message: type(message).__name__)
def test_a_field_of_another_kind_never_arrives(message):
    """80 messages with one array of another type, shape or length: those of another type or shape are refused."""
    for seed in range(80):
        try:
            found = m.unpack(as_bytes(mutated(message, random.Random(seed))))
        except ProtocolError:
            continue
        assert_typed(found)


def assert_typed(record: object) -> None:
    """Arrays have the dtypes and dimensions of their fields; times are finite and not negative."""
    kind = type(record).__name__
    for name, hint in field_types(type(record)).items():
        value = getattr(record, name)
        if hint is m.Array:
            dtype, dimensions = m._FORMS.get((kind, name), ("int32", 1))
            assert isinstance(value, np.ndarray)
            assert (value.dtype.name, value.ndim) == (dtype, dimensions)
        elif isinstance(value, m.Dists | m.Scores | m.Hidden | m.Drafted):
            assert_typed(value)
        elif hint is float:
            assert 0 <= value < float("inf")


def test_no_shape_makes_room_for_more_than_was_sent():
    """A head that promises 2^60 elements is refused before anything is allocated."""
    head, *rest = as_bytes(m.Failed(6, m.empty("int64"), "why"))
    data = msgpack.unpackb(head) | {"rows": ["int64", [2**60]]}
    with pytest.raises(ProtocolError):
        m.unpack([msgpack.packb(data), *rest])


def test_what_holds_nothing_is_not_sent_and_comes_back():
    """A verdict about chains, without scores, states or drafts, names what it has only."""
    one = np.array([1], dtype=np.int32)
    sent = m.Verdict(3, one.astype(np.int64), one, one, one, 0.5, 0.25)
    frames = as_bytes(sent)

    assert msgpack.unpackb(frames[0]).keys() == {
        "kind", "round", "rows", "epochs", "kept", "next", "forward_s", "sampling_s", "steps"
    }  # fmt: skip
    found = m.unpack(frames)
    assert isinstance(found, m.Verdict)
    assert found.scores is sent.scores
    assert found.last.dtype == np.int32
    assert len(found.last) == 0


@pytest.mark.parametrize("missing", ["round", "steps", "forward_s"])
def test_a_number_that_is_missing_is_refused(missing):
    """Only arrays and their bundles may be left out."""
    frames = as_bytes(next(message for message in EVERY if isinstance(message, m.Verdict)))
    head = msgpack.unpackb(frames[0])
    del head[missing]

    with pytest.raises(ProtocolError, match=missing):
        m.unpack([msgpack.packb(head), *frames[1:]])
