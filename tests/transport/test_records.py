"""Records on the wire come back equal, and nothing comes back that is not of its type."""

from __future__ import annotations

import msgpack
import pytest

from specserve.errors import ProtocolError
from specserve.transport.records import decoder, encoder
from specserve.types import Delta, Failure, Request, RequestId, RequestStats, Sampling, TokenLogprob

CHAIN = Sampling(0.5, 0.9, 40, 0.1, 1.2, -1, 0.5, ((3, -100), (4, 0.5)), 2, ((1,), (2, 3)), (1, 2, 3))
RECORDS = [
    Sampling(),
    CHAIN,
    Request(RequestId("r"), (1, 2), 3, CHAIN, 2**63, ("a", "é"), (5,), True, 3, 1, "family", 20, 0),
    Delta(RequestId("r"), (1,), 1, 2, "stop", 5, RequestStats(3, 4, 2, 6, 2, (0, 1), 0.1, 0.2, 0.3)),
    Delta(RequestId("r"), (), stop_reason="end", failure=Failure(400, "invalid_value", "wrong", "stop")),
    TokenLogprob(1, None, ((1, -0.5),)),
]


def wire(record):
    """What msgpack makes of a record's encoding."""
    encode = encoder(type(record))
    assert encode is not None
    return msgpack.unpackb(msgpack.packb(encode(record)))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_equal(record):
    """Nested records, optional ones, tuples of tuples, and numbers up to 64 bits."""
    assert decoder(type(record))(wire(record)) == record


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, "1"), (0, True), (2, 1.5), (2, True), (7, [[1, 2, 3]]), (7, [1]), (7, {"1": 2}), (9, [["a"]]), (10, 5)],
)
def test_a_field_of_another_type_is_refused(place, value):
    """Texts, flags, wrong lengths and mappings where numbers and lists belong."""
    data = wire(CHAIN)
    data[place] = value
    with pytest.raises(ProtocolError):
        decoder(Sampling)(data)


@pytest.mark.parametrize("data", [[], [1.0], [1.0] * 12, "x", None, 5, {}])
def test_a_list_of_another_length_is_refused(data):
    """A record has exactly its fields."""
    with pytest.raises(ProtocolError):
        decoder(Sampling)(data)


def test_an_unknown_choice_is_refused():
    """A finish reason that nobody knows is damage."""
    data = wire(RECORDS[3])
    data[4] = "boredom"
    with pytest.raises(ProtocolError, match="boredom"):
        decoder(Delta)(data)
