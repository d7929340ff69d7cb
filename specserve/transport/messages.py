"""What crosses the wire, and its binary form. Nothing is ever unpickled.

A batch of rows is columnar: one array per field, ragged fields flattened with a lengths array beside them. n rows,
Σ over their lengths. Integers are int32 unless said otherwise; row ids are int64.

Frames of a message: a msgpack map {"kind": class name, field: value, …} in which every array field is described as
[dtype, shape], then the arrays' raw bytes in field order. `pack` and `unpack` do exactly that and refuse the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, get_args, get_type_hints

import msgpack
import numpy as np
import numpy.typing as npt

from specserve.errors import ProtocolError
from specserve.types import Delta, Failure, Request, RequestId, RequestStats, Sampling, Structured, StructuredKind

Array = npt.NDArray[Any]

Buffer = bytes | memoryview


def empty(dtype: str = "int32") -> Array:
    """A 1-D array without elements."""
    return np.empty(0, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Message:
    """The root of all messages."""

    KINDS: ClassVar[dict[str, type[Message]]] = {}


def _register(kind: type[Any]) -> type[Any]:
    Message.KINDS[kind.__name__] = kind
    return kind


# ---- coordinator → worker -------------------------------------------------------------------------------------


@_register
@dataclass(frozen=True, slots=True)
class Open(Message):
    """What a request is: idempotent, sent before its first row to each worker and again after a worker's restart.

    tokens int32 [committed so far]; of these the first prompt_length are the prompt.
    """

    row: int
    epoch: int
    tokens: Array
    prompt_length: int
    temperature: float
    top_p: float
    top_k: int
    rule: str
    seed: int
    structured: Structured | None = None


@_register
@dataclass(frozen=True, slots=True)
class Close(Message):
    """The worker may forget this row."""

    row: int


@_register
@dataclass(frozen=True, slots=True)
class Plan(Message):
    """Work for the draft worker: feed each row, then draft `depths[r]` tokens after it.

    rows int64 [n]; epochs [n]; starts [n] the absolute position of the first fed token, all KV past it is void;
    feed_lengths [n], feeds [Σ feed_lengths]; depths [n], 0 feeds only; slots [Σ depths] leased in chain order;
    table_lengths [n], tables [Σ table_lengths] block ids that cover start + feed + depth − 1 positions.
    """

    plan: int
    rows: Array
    epochs: Array
    starts: Array
    feed_lengths: Array
    feeds: Array
    depths: Array
    slots: Array
    table_lengths: Array
    tables: Array


@_register
@dataclass(frozen=True, slots=True)
class Verify(Message):
    """Work for the verifier: feed each row, and where a token is due check its chain and choose the next token.

    rows, epochs, starts, feed_lengths, feeds, table_lengths, tables as in `Plan`; tables cover feed and chain.
    due bool [n]: the feed ends at the newest committed token. chain_lengths [n], 0 unless due; chains [m] tokens;
    dist_rows [m]: row of `dists` that the token was drawn from, −1 for a token chosen without chance.
    """

    round: int
    rows: Array
    epochs: Array
    starts: Array
    feed_lengths: Array
    feeds: Array
    due: Array
    chain_lengths: Array
    chains: Array
    dist_rows: Array
    dists: Dists
    table_lengths: Array
    tables: Array


@dataclass(frozen=True, slots=True)
class Dists:
    """Draft dists by row, as opaque bytes: the coordinator hands them on and never looks inside.

    form "sparse": a row is `width` int32 ids followed by `width` float16 probabilities, unused ones 0.
    form "dense": a row is `width` float16 probabilities, one per vocabulary id.
    rows uint8 [n, bytes per row]. Probabilities are those that were sampled from, after rounding to float16;
    both sides divide by their float32 sum.
    """

    form: str
    width: int
    rows: Array

    @staticmethod
    def none() -> Dists:
        """No rows at all."""
        return Dists("sparse", 0, np.empty((0, 0), dtype="uint8"))


# ---- worker → coordinator -------------------------------------------------------------------------------------


@_register
@dataclass(frozen=True, slots=True)
class Push(Message):
    """Drafted nodes. One push answers one plan, in the plan's row order.

    rows int64 [n]; epochs [n]; bases [n] the committed length that the chain continues; covered [n] positions of
    committed tokens now cached; chain_lengths [n]; per node, m in all: tokens, parents (index within the row's
    nodes, −1 for the root), slots, fed bool (its KV is written), sampled bool (may be offered to the target);
    dists one row per node, in node order, or no rows when the nodes were chosen without chance.
    busy_s is the time that the worker computed.
    """

    plan: int
    rows: Array
    epochs: Array
    bases: Array
    covered: Array
    chain_lengths: Array
    tokens: Array
    parents: Array
    slots: Array
    fed: Array
    sampled: Array
    dists: Dists
    busy_s: float


@_register
@dataclass(frozen=True, slots=True)
class Verdict(Message):
    """What the target said. kept [n] drafted tokens confirmed; next [n] the token after them, −1 where none was due.

    forward_s and sampling_s are the times that the worker computed.
    """

    round: int
    rows: Array
    epochs: Array
    kept: Array
    next: Array
    forward_s: float
    sampling_s: float


@_register
@dataclass(frozen=True, slots=True)
class Cannot(Message):
    """The worker cannot start where it was told to: `covered` [n] positions are all it has of these rows."""

    batch: int
    rows: Array
    epochs: Array
    covered: Array


@_register
@dataclass(frozen=True, slots=True)
class Failed(Message):
    """A batch (a plan or a round) raised. rows int64 [n] are those at fault; none named means the whole batch."""

    batch: int
    rows: Array
    reason: str


@_register
@dataclass(frozen=True, slots=True)
class Beat(Message):
    """A sign of life. `progress` counts finished batches; `busy` says whether one is being computed."""

    progress: int
    busy: bool


# ---- ingress ↔ coordinator ------------------------------------------------------------------------------------


@_register
@dataclass(frozen=True, slots=True)
class Submit(Message):
    """A client's request enters."""

    request: Request


@_register
@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """The client of this request is gone."""

    id: str


@_register
@dataclass(frozen=True, slots=True)
class Deltas(Message):
    """All that a round brought to one ingress. cursor counts these messages from 1."""

    cursor: int
    deltas: tuple[Delta, ...]


# ---- binary form ----------------------------------------------------------------------------------------------

_DTYPES = frozenset({"int32", "int64", "uint8", "bool", "float16", "float32"})
_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    known = _HINTS.get(kind)
    if known is None:
        hints = get_type_hints(kind)
        known = _HINTS[kind] = {f.name: hints[f.name] for f in fields(kind)}
    return known


def pack(message: Message) -> list[Buffer]:
    """Turn a message into frames: a msgpack head and one buffer per array."""
    head: dict[str, Any] = {"kind": type(message).__name__}
    buffers: list[Buffer] = []
    for name in _hints(type(message)):
        value = getattr(message, name)
        if isinstance(value, np.ndarray):
            head[name] = _describe(value, buffers)
        elif isinstance(value, Dists):
            head[name] = [value.form, value.width, *_describe(value.rows, buffers)]
        elif isinstance(value, (Request, Structured)):
            head[name] = asdict(value)
        elif name == "deltas":
            head[name] = [_delta_to_wire(delta) for delta in value]
        else:
            head[name] = value
    return [msgpack.packb(head), *buffers]


def _describe(array: Array, buffers: list[Buffer]) -> list[Any]:
    array = np.ascontiguousarray(array)
    buffers.append(array.data.cast("B") if array.size else b"")
    return [array.dtype.name, list(array.shape)]


def unpack(frames: Sequence[Buffer]) -> Message:
    """The message in these frames. Raises ProtocolError for anything that `pack` could not have made."""
    if not frames:
        raise ProtocolError("a message without frames")
    try:
        head = msgpack.unpackb(frames[0], strict_map_key=True)
        kind = Message.KINDS[head.pop("kind")]
        hints = _hints(kind)
        if head.keys() != hints.keys():
            raise ProtocolError(f"{kind.__name__} with fields {sorted(head)}, expected {sorted(hints)}")
        rest = iter(frames[1:])
        values = {name: _value(hints[name], head[name], rest) for name in hints}
        if next(rest, None) is not None:
            raise ProtocolError(f"{kind.__name__} with more buffers than arrays")
        return kind(**values)
    except ProtocolError:
        raise
    except Exception as error:  # whatever a damaged frame provokes is one thing to the caller: a bad message
        raise ProtocolError(f"damaged message: {type(error).__name__}: {error}") from None


def _value(hint: Any, described: Any, buffers: Any) -> Any:
    if hint is Dists:
        form, width, dtype, shape = described
        if form not in ("sparse", "dense") or not isinstance(width, int):
            raise ProtocolError(f"unknown dists: {form!r}, width {width!r}")
        return Dists(form, width, _array(dtype, shape, next(buffers)))
    if hint is Request:
        return _request_from_wire(described)
    if hint == Structured | None:
        return _structured_from_wire(described)
    if hint == tuple[Delta, ...]:
        return tuple(_delta_from_wire(item) for item in described)
    if hint in (int, float, str, bool):
        if not isinstance(described, (int, float) if hint is float else hint):
            raise ProtocolError(f"expected {hint.__name__}, found {type(described).__name__}")
        return described
    dtype, shape = described
    return _array(dtype, shape, next(buffers))


def _array(dtype: str, shape: list[int], buffer: Buffer) -> Array:
    if dtype not in _DTYPES:
        raise ProtocolError(f"array of type {dtype!r}")
    if any(not isinstance(n, int) or n < 0 for n in shape):
        raise ProtocolError(f"array of shape {shape!r}")
    return np.frombuffer(buffer, dtype=dtype).reshape(shape)


def _request_from_wire(data: dict[str, Any]) -> Request:
    fixed = dict(data)
    fixed["id"] = RequestId(fixed["id"])
    fixed["sampling"] = Sampling(**fixed["sampling"])
    for name in ("prompt", "stop", "stop_token_ids"):
        fixed[name] = tuple(fixed[name])
    fixed["structured"] = _structured_from_wire(fixed["structured"])
    return Request(**fixed)


def _structured_from_wire(data: dict[str, Any] | None) -> Structured | None:
    if data is None:
        return None
    found = Structured(**data)
    if found.kind not in get_args(StructuredKind) or not isinstance(found.spec, str):
        raise ProtocolError(f"unknown structured output: {found.kind!r} with {type(found.spec).__name__}")
    return found


def _delta_to_wire(delta: Delta) -> list[Any]:
    return [
        delta.request,
        delta.tokens,
        delta.kept,
        delta.offered,
        delta.finish,
        delta.stop_reason,
        None if delta.stats is None else asdict(delta.stats),
        None if delta.failure is None else asdict(delta.failure),
    ]


def _delta_from_wire(data: list[Any]) -> Delta:
    request, tokens, kept, offered, finish, stop_reason, stats, failure = data
    if stats is not None:
        stats = RequestStats(**{**stats, "histogram": tuple(stats["histogram"])})
    return Delta(
        RequestId(request),
        tuple(tokens),
        kept,
        offered,
        finish,
        stop_reason,
        stats,
        None if failure is None else Failure(**failure),
    )
