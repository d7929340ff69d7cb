"""What crosses the wire, and its binary form. Nothing is ever unpickled.

A batch of rows is columnar: one array per field, ragged fields flattened with a lengths array beside them. n rows,
Σ over their lengths. Integers are int32 unless said otherwise; row ids are int64; floats of a message are times in
seconds. What arrives has these types and dimensions, and times from 0 on; whether lengths and values fit is for
whoever takes it.

Frames of a message: a msgpack map {"kind": class name, field: value, …} in which every array is described as
[dtype in numpy's short form, shape] and every record as the list of its fields (`records`); then the raw bytes of all
small arrays in field order, each padded to 8 bytes; then each large array. A field that is an array without elements,
or a bundle of arrays that holds nothing, is left out of the map. Few frames and fields matter: in a round each of them
costs both sides more than its bytes do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, Literal

import msgpack
import numpy as np
import numpy.typing as npt

from specserve.errors import ProtocolError
from specserve.transport.records import decoder, encoder, field_types
from specserve.types import Delta, Request, RequestStats, Sampling, Structured

Array = npt.NDArray[Any]

Buffer = bytes | memoryview


@cache
def empty(dtype: str = "int32") -> Array:
    """The 1-D array without elements."""
    return np.empty(0, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Message:
    """The root of all messages."""

    KINDS: ClassVar[dict[str, type[Message]]] = {}


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states of the target, as opaque bytes: the coordinator hands them on and never looks inside.

    dtype is that of the target; rows uint8 [n, bytes per row].
    """

    dtype: Literal["float32", "bfloat16", "float16"]
    rows: Array

    @staticmethod
    @cache
    def none() -> Hidden:
        """No rows at all."""
        return Hidden("float32", np.empty((0, 0), dtype="uint8"))


_NO_HIDDEN = Hidden.none()


def _register(kind: type[Any]) -> type[Any]:
    Message.KINDS[kind.__name__] = kind
    return kind


# ---- coordinator → worker -------------------------------------------------------------------------------------


@_register
@dataclass(frozen=True, slots=True)
class Open(Message):
    """What a request is: idempotent, sent before its first row to each worker and again after a worker's restart.

    tokens int32 [committed so far]; of these the first prompt_length are the prompt. end_tokens are the ids that
    would end the answer. logprobs and prompt_logprobs are alternatives wanted beside each token, None for no scores.
    branch numbers the answers that one client request asked for, from 0; each has noise of its own.
    """

    row: int
    epoch: int
    tokens: Array
    prompt_length: int
    sampling: Sampling
    end_tokens: tuple[int, ...]
    rule: str
    seed: int
    branch: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
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
    Where the speculator reads hidden states: hidden holds one row for each fed token, the target's state at the
    position before it, and origins [n] the first position of each row whose KV may be read, at least 1.
    levels [n], no elements where all rows draft chains: the levels of the tree to grow, 0 for a chain. A tree's slots
    are one for each place that may have children, in the order in which these are looked at; its table covers the
    feed and the nodes that are fed. nodes, like levels: the most nodes that each tree may have.
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
    origins: Array = field(default_factory=empty)
    hidden: Hidden = _NO_HIDDEN
    levels: Array = field(default_factory=empty)
    nodes: Array = field(default_factory=empty)


@_register
@dataclass(frozen=True, slots=True)
class PlanAhead(Message):
    """Work for the draft worker while the verifier checks a chain: draft what may follow each of its outcomes.

    A trunk is a request's committed tokens and the chain that is being checked; a branch leaves it after `parents`
    chain tokens with a guess of the target's next token, the one of the given rank in the draft's own dist there, and
    goes on with `depths` drafted tokens.

    rows int64 [n]; epochs [n]; bases [n] committed tokens; text_starts [n], text_lengths [n], texts [Σ]: the trunk's
    tokens from an absolute position on, of which what lies before the base is committed; starts [n] from here on they
    are fed, all KV past it is void; chain_lengths [n] of the text's last tokens are the chain, slots of whose dists are
    in chain_slots [Σ]; next_slots [n]: the slot in which plan next_plans int64 [n] drafted a token behind the whole
    chain, −1 for none; where it did, all of the chain was fed, and is not fed again. table_lengths [n], tables [Σ]
    block ids that cover the trunk.
    branch_counts [n], B in all; parents [B]; ranks [B], from 0, the chain's own token at that place not counted;
    firsts [B] the step, 0 or 1, in which the guess is fed: 0 only where it needs nothing that step 0 makes, which for
    one behind the whole chain is so if a next_slot tells it, and else comes to be 1;
    depths [B]; slots [Σ depths] in order of drafting; own_lengths [B], own_blocks [Σ]: the blocks that follow the
    trunk's full blocks of the first base + parent positions; copies [B]: the trunk's block whose beginning goes into
    the first of them, −1 where none is partly filled.
    Where the speculator reads hidden states: origins as in `Plan`, and hidden holds one row for each committed token
    that is fed. Tokens of chains are read with the speculator's own states, which their slots hold.
    """

    plan: int
    rows: Array
    epochs: Array
    bases: Array
    text_starts: Array
    text_lengths: Array
    texts: Array
    starts: Array
    chain_lengths: Array
    chain_slots: Array
    next_slots: Array
    next_plans: Array
    table_lengths: Array
    tables: Array
    branch_counts: Array
    parents: Array
    ranks: Array
    firsts: Array
    depths: Array
    slots: Array
    own_lengths: Array
    own_blocks: Array
    copies: Array
    origins: Array = field(default_factory=empty)
    hidden: Hidden = _NO_HIDDEN


@_register
@dataclass(frozen=True, slots=True)
class Verify(Message):
    """Work for the verifier: feed each row, and where a token is due check its chain and choose the next token.

    rows, epochs, starts, feed_lengths, feeds, table_lengths, tables as in `Plan`; tables cover feed and chain.
    due bool [n]: the feed ends at the newest committed token. chain_lengths [n], 0 unless due; chains [m] tokens;
    dist_rows [m]: row of `dists` that the token was drawn from, −1 for a token chosen without chance.
    shown [n]: of so many last tokens of the feed the hidden states are wanted, and of the drafted ones that are kept
    behind them; 0 for a row of which none are, no elements where there are only such.
    depths [n]: tokens that a speculator beside the verifier is to draft behind the verdict, 0 feeds it only; no
    elements where there is no such speculator.
    parents [m], no elements where all rows are chains: the node before each one within its row, −1 for the first; the
    dist of a tree's node is the one that its first sibling was drawn from, and siblings stand in the order of drawing.
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
    shown: Array = field(default_factory=empty)
    depths: Array = field(default_factory=empty)
    parents: Array = field(default_factory=empty)


@dataclass(frozen=True, slots=True)
class Dists:
    """Draft dists by row, as opaque bytes: the coordinator hands them on and never looks inside.

    form "sparse": a row is `width` int32 ids followed by `width` float16 probabilities, unused ones 0.
    form "dense": a row is `width` float16 probabilities, one per vocabulary id.
    rows uint8 [n, bytes per row]. Probabilities are those that were sampled from, after rounding to float16;
    both sides divide by their float32 sum.
    """

    form: Literal["sparse", "dense"]
    width: int
    rows: Array

    @staticmethod
    @cache
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
    dists one row per node, in node order, or no rows when the nodes were chosen without chance. Siblings of a tree
    have one slot, that of the dist which the first of them was drawn from, and one row of dists, at their first.
    sureness float32 [m], no elements where nobody asks: the chance that each token seems to have of being kept where
    those before it are, which nothing that is drawn behind its parent has a part in.
    busy_s is the time that the worker computed. steps: see `models.Steps`, of what came since the last message.
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
    steps: tuple[int, int, int] = (0, 0, 0)
    sureness: Array = field(default_factory=partial(empty, "float32"))


@_register
@dataclass(frozen=True, slots=True)
class PushAhead(Message):
    """What a `PlanAhead` has brought since the last push; pushes are numbered from 0 in `step`.

    branches [m] index the plan's branches; places [m]: −1 for a branch's guess, else how many drafted tokens stand
    between it and this one; tokens [m]; dists: one row per token that is not a guess, in order, or no rows when these
    were chosen without chance. With the first push the trunks are fed; after the last one nothing of the plan is
    written any more. busy_s is the time that the worker computed since the last push; steps as in `Push`.
    """

    plan: int
    step: int
    last: bool
    branches: Array
    places: Array
    tokens: Array
    dists: Dists
    busy_s: float
    steps: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of tokens under the target's unprocessed dist, for n rows, or no arrays' elements at all.

    lengths [n] tokens scored in each row; widths [n] alternatives beside each; logprobs float32 [Σ lengths];
    top_ids [Σ lengths·widths] and top_logprobs float32 likewise, likeliest first.
    """

    lengths: Array
    widths: Array
    logprobs: Array
    top_ids: Array
    top_logprobs: Array

    @staticmethod
    @cache
    def none() -> Scores:
        """Nobody asked."""
        return Scores(empty(), empty(), empty("float32"), empty(), empty("float32"))


_NO_SCORES = Scores.none()


@dataclass(frozen=True, slots=True)
class Drafted:
    """Chains that were drafted beside the verifier behind the tokens of a verdict, for n rows, or no elements at all.

    lengths [n]; tokens [Σ]; dists one row per token, in order, or no rows when they were chosen without chance. busy_s
    is the time that this took.
    """

    lengths: Array
    tokens: Array
    dists: Dists
    busy_s: float

    @staticmethod
    @cache
    def none() -> Drafted:
        """Nobody drafts here."""
        return Drafted(empty(), empty(), Dists.none(), 0.0)


_NO_DRAFTED = Drafted.none()


@_register
@dataclass(frozen=True, slots=True)
class Verdict(Message):
    """What the target said. kept [n] drafted tokens confirmed; next [n] the token after them, −1 where none was due.

    forward_s and sampling_s are the times that the worker computed. scores are those of the kept + 1 tokens of each
    due row that asked; prompt_scores those of the prompt tokens after each fed one, from start + 1 on.
    hidden holds the states at the fed positions and at those of the kept tokens, of each row that asked, in order.
    drafted holds chains behind the next tokens, at most as long as the round's `depths`.
    last [n], no elements where all rows are chains: the last kept node of each row, −1 for none.
    steps as in `Push`.
    """

    round: int
    rows: Array
    epochs: Array
    kept: Array
    next: Array
    forward_s: float
    sampling_s: float
    scores: Scores = _NO_SCORES
    prompt_scores: Scores = _NO_SCORES
    hidden: Hidden = _NO_HIDDEN
    drafted: Drafted = _NO_DRAFTED
    last: Array = field(default_factory=empty)
    steps: tuple[int, int, int] = (0, 0, 0)


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
    """A client's request enters.

    before is what a request that was sent earlier has come to, as far as its ingress knows: it may have been lost on
    the way or with a coordinator, or be running. One that runs here already is not taken twice.
    """

    request: Request
    before: RequestStats | None = None


@_register
@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """The client of this request is gone."""

    id: str


@_register
@dataclass(frozen=True, slots=True)
class Deltas(Message):
    """All that a round brought to one ingress. cursor counts these messages from 1.

    The ingress acknowledges them with its beats, whose `progress` is the last cursor that it has.
    """

    cursor: int
    deltas: tuple[Delta, ...]


@_register
@dataclass(frozen=True, slots=True)
class Places(Message):
    """Which requests of the ingress wait for a place now, and which have begun though they were said to wait.

    That a request begins is said before anything is done for it: one that waits cannot be what ends its coordinator.
    One of which nothing was said may have begun.
    """

    waiting: tuple[str, ...]
    begun: tuple[str, ...]


@_register
@dataclass(frozen=True, slots=True)
class Reconnect(Message):
    """Something that the ingress sent was lost on the way: it is to connect again, and then to send what is missing."""


# ---- binary form ----------------------------------------------------------------------------------------------

_FORMS: dict[tuple[str, str], tuple[str, int]] = {
    **{(kind, "rows"): ("int64", 1) for kind in ("Plan", "PlanAhead", "Verify", "Push", "Verdict", "Cannot", "Failed")},
    ("PlanAhead", "next_plans"): ("int64", 1),
    **{("Push", name): ("bool", 1) for name in ("fed", "sampled")},
    ("Push", "sureness"): ("float32", 1),
    **{("Scores", name): ("float32", 1) for name in ("logprobs", "top_logprobs")},
    ("Verify", "due"): ("bool", 1),
    ("Dists", "rows"): ("uint8", 2),
    ("Hidden", "rows"): ("uint8", 2),
}
"""Element type and dimensions of arrays, by record and field, where they are not ("int32", 1)."""

_BUNDLES = (Dists, Scores, Hidden, Drafted)
"""Records that hold arrays. Their `none()` is one object, by which it is known."""


_ALIGN = 8
_PADDING = [b"\0" * (-size % _ALIGN) for size in range(_ALIGN)]
_LARGE_BYTES = 65536
"""From here on an array travels as a buffer of its own instead of being copied into the common one."""


def pack(message: Message) -> list[Buffer]:
    """Turn a message into a msgpack head, one buffer with all small arrays, and one for each large array."""
    small: list[Buffer] = []
    large: list[Buffer] = []
    kind: Any = type(message)
    head: dict[str, Any] = {"kind": kind.__name__}
    for name, describe, nothing in _fields_to_pack(kind):
        value = getattr(message, name)
        if describe is None:
            head[name] = value
        elif value is not nothing and (describe is not _described_array or value.size):
            head[name] = describe(value, small, large)
    return [msgpack.packb(head), b"".join(small), *large]


_Describer = Callable[[Any, list[Buffer], list[Buffer]], Any]
"""Makes of a field's value what stands for it in the head; bytes go into the two lists."""


_SOMETHING = object()
"""What no field ever holds: of those that are always sent."""


@cache
def _fields_to_pack(kind: type[Any]) -> list[tuple[str, _Describer | None, object]]:
    """For each field how it is described, None where a value stands for itself, and what of it is left out.

    Found once: types compare slowly.
    """
    types = field_types(kind).items()
    return [(name, _describer(hint), _nothing(kind, name, hint)) for name, hint in types]


def _nothing(kind: type[Any], name: str, hint: Any) -> Any:
    """What a field holds that was left out; `_SOMETHING` for one that never is."""
    if hint == Array:
        return empty(_FORMS.get((kind.__name__, name), ("int32", 1))[0])
    return hint.none() if hint in _BUNDLES else _SOMETHING


def _left_out(name: str, nothing: Any) -> Any:
    if nothing is _SOMETHING:
        raise ProtocolError(f"a message without {name}")
    return nothing


def _describer(hint: Any) -> _Describer | None:
    if hint == Array:
        return _described_array
    if hint in _BUNDLES:
        return partial(_described_bundle, [(name, describe) for name, describe, _ in _fields_to_pack(hint)])
    encode = encoder(hint)
    return None if encode is None else lambda value, small, large: encode(value)


def _described_bundle(
    parts: list[tuple[str, _Describer | None]], bundle: Any, small: list[Buffer], large: list[Buffer]
) -> list[Any]:
    values = [(getattr(bundle, name), describe) for name, describe in parts]
    return [value if describe is None else describe(value, small, large) for value, describe in values]


def _described_array(array: Array, small: list[Buffer], large: list[Buffer]) -> list[Any]:
    size = array.nbytes
    if size >= _LARGE_BYTES:
        large.append(np.ascontiguousarray(array).data.cast("B"))
    elif size:
        small.append(array.tobytes())
        if size % _ALIGN:
            small.append(_PADDING[size % _ALIGN])
    return [array.dtype.str, array.shape]


class _Buffers:
    """The arrays of a received message, taken in the order in which they were packed."""

    def __init__(self, small: Buffer, large: Sequence[Buffer]) -> None:
        self._small = memoryview(small)
        self._at = 0
        self._large = list(reversed(large))

    def take(self, form: tuple[np.dtype[Any], int], dtype: str, shape: list[int]) -> Array:
        """The next array, of this type and so many dimensions. Raises ProtocolError for another, ValueError if cut."""
        wanted, dimensions = form
        if dtype != wanted.str:
            raise ProtocolError(f"array of type {dtype!r} where {wanted.str} belongs")
        if len(shape) != dimensions or any([type(n) is not int or n < 0 for n in shape]):
            raise ProtocolError(f"array of shape {shape!r} where {dimensions} dimensions belong")
        count = math.prod(shape)
        size = count * wanted.itemsize
        if size >= _LARGE_BYTES:
            return np.frombuffer(self._large.pop(), dtype=wanted).reshape(shape)
        array = np.frombuffer(self._small, wanted, count, self._at) if count else np.empty(0, wanted)
        self._at += size + -size % _ALIGN
        return array if len(shape) == 1 else array.reshape(shape)

    def finish(self) -> None:
        """Raises ProtocolError when something is left over."""
        if self._large or self._at != len(self._small):
            raise ProtocolError("a message with more bytes than arrays")


def unpack(frames: Sequence[Buffer]) -> Message:
    """The message in these frames. Raises ProtocolError for anything that `pack` could not have made."""
    if len(frames) < 2:
        raise ProtocolError(f"a message of {len(frames)} frames")
    try:
        head = msgpack.unpackb(frames[0], strict_map_key=True)
        kind: Any = Message.KINDS[head.pop("kind")]
        buffers = _Buffers(frames[1], frames[2:])
        values = [
            read(head.pop(name), buffers) if name in head else _left_out(name, nothing)
            for name, read, nothing in _fields_to_read(kind)
        ]
        buffers.finish()
        if head:
            raise ProtocolError(f"{kind.__name__} with fields that it does not have: {sorted(head)}")
        message: Message = kind(*values)
        return message
    except ProtocolError:
        raise
    except Exception as error:  # whatever a damaged frame provokes is one thing to the caller: a bad message
        raise ProtocolError(f"damaged message: {type(error).__name__}: {error}") from None


_Reader = Callable[[Any, _Buffers], Any]
"""The inverse of a `_Describer`."""


@cache
def _fields_to_read(kind: type[Any]) -> list[tuple[str, _Reader, object]]:
    """For each field how it is read, and what it holds where it was left out."""
    types = field_types(kind).items()
    return [(name, _reader(kind, name, hint), _nothing(kind, name, hint)) for name, hint in types]


def _reader(kind: type[Any], name: str, hint: Any) -> _Reader:
    if hint == Array:
        dtype, dimensions = _FORMS.get((kind.__name__, name), ("int32", 1))
        return partial(_read_array, (np.dtype(dtype), dimensions))
    if hint in _BUNDLES:
        return partial(_read_bundle, hint, [read for _, read, _ in _fields_to_read(hint)])
    decode = decoder(hint)
    if hint is float:
        return lambda described, buffers: _time(f"{kind.__name__}.{name}", decode(described))
    return lambda described, buffers: decode(described)


def _time(what: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ProtocolError(f"{what} is {value}, not a time")
    return value


def _read_array(form: tuple[np.dtype[Any], int], described: Any, buffers: _Buffers) -> Array:
    dtype, shape = described
    return buffers.take(form, dtype, shape)


def _read_bundle(kind: type[Any], readers: list[_Reader], described: Any, buffers: _Buffers) -> Any:
    return kind(*[read(each, buffers) for read, each in zip(readers, described, strict=True)])
