"""The words of the project and the records that cross rooms. No torch, no ray, no HTTP.

target / draft   the two models
committed        tokens that are part of the answer, prompt included; only the coordinator decides them
row              one request's share of a round
chain            drafted tokens offered to the target for checking, in order
depth            chain length wanted; 0 is plain decoding
kept             drafted tokens confirmed by one verification; a decode row yields kept + 1 tokens
feed             committed tokens that a worker has not cached yet
round            one verification of a batch
slot             numbered place in the draft worker's workspace that holds the dist a node was drawn from
block            a page of KV of one model
epoch / life     stamp of a request's incarnation / of a worker's; what carries an old stamp is dropped
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol

if TYPE_CHECKING:
    from specserve.errors import SpecserveError
    from specserve.metrics.board import Snapshot

RequestId = NewType("RequestId", str)
"""The public id of a request, unique while it lives."""

RowId = NewType("RowId", int)
"""The coordinator's own number for a request; never reused in a coordinator's life."""

FinishReason = Literal["stop", "length", "abort", "error"]

Role = Literal["draft", "target"]

ROLES: tuple[Role, ...] = ("draft", "target")

LostBy = Literal["lost", "hung", "protocol", "channel", "replaced"]
"""Why a worker is given up: gone or silent, stuck in a batch, said what it may not, cannot be told, has a successor."""

RuleName = str
"""The name of a file in `verification/` that holds a rule."""

SourceName = str
"""The name of a file in `drafting/` that holds a speculator."""

DraftPicks = Literal["sampling", "argmax", "shared_noise"]
"""How a draft picks tokens: drawn from its dist, the likeliest, or the winners under noise shared with the target."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits; every default leaves the model's own dist as it is.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch those filters off.
    repetition_penalty divides (or multiplies, below 0) the logits of tokens in prompt and answer; presence_penalty is
    subtracted once, frequency_penalty once per occurrence, for tokens of the answer.
    logit_bias holds (token id, added to its logit). The answer cannot end within its first min_tokens tokens.
    bad_words are token sequences that the answer may not hold; allowed_token_ids, if any, are all that it may hold.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None


StructuredKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Structured:
    """What the text of an answer must be.

    spec by kind: a JSON schema as JSON text; nothing; a regular expression that the whole answer matches; a JSON list
    of the texts to choose from; a grammar in Lark's or GBNF's notation.
    """

    kind: StructuredKind
    spec: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be generated. Everything here is already validated by the door it came through.

    depth None means the deployment's depth; 0 switches speculation off for this request.
    stop holds texts, stop_token_ids token ids; the model's own end tokens are known to the coordinator.
    rule None means the deployment's rule. branch numbers the answers to one client request that share a seed, from 0;
    requests of one family have the same prompt and share its KV where they meet. logprobs (and prompt_logprobs, for
    the prompt's own tokens) is the number of alternatives to report beside each token, None for no report at all.
    max_tokens 0 reads the prompt only.
    structured holds the answer to a grammar, at whose end only an end token may follow; it excludes ignore_eos.
    source names the one speculator that drafts for this request; None means the deployment's, behind the prediction
    where there is one. prediction holds the tokens that the client expects the answer to be, none if it expects
    nothing: they are drafts, and change no answer. client numbers the API key that asks, from 1; 0 is none. Clients
    take turns in the queue.
    trace is the W3C traceparent of the span that this request belongs to, None where nobody traces it.
    Requests of different cache_salt never share KV.
    answer holds the tokens with which the answer begins, all of which the client has: those of a request that goes on
    after its coordinator was lost. They count like tokens generated here.
    patient says that nobody reads the answer before its end, so that it need not be told round by round.
    """

    id: RequestId
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    depth: int | None = None
    branch: int = 0
    family: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    rule: RuleName | None = None
    structured: Structured | None = None
    source: SourceName | None = None
    prediction: tuple[int, ...] = ()
    trace: str | None = None
    cache_salt: str = ""
    answer: tuple[int, ...] = ()
    client: int = 0
    patient: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """What the target, before all sampling options, thinks of a token: natural logarithms of probabilities.

    top holds the likeliest (token id, logprob), likeliest first. logprob is None where nothing precedes the token.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What one request cost. Times are seconds; `histogram[k]` counts decode rounds that kept k drafted tokens.

    accepted_prediction_tokens of the answer are as the client's prediction said; rejected_prediction_tokens were
    taken from it as drafts, and the target wrote something else. A token may be taken, and rejected, several times.
    cached_tokens of the prompt were in the target's prefix cache, and were not computed.
    What a lost coordinator did for the request counts too, except the wait in its queue, which nobody else knows.
    """

    prompt_tokens: int
    generated_tokens: int
    rounds: int
    drafted_tokens: int
    kept_tokens: int
    histogram: tuple[int, ...]
    queue_s: float
    first_token_s: float
    total_s: float
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended in an error, in the words of `errors`; param names the field at fault, where there is one."""

    status: int
    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: SpecserveError) -> Failure:
        """What an error says, for whoever sent the request."""
        return cls(error.status, error.code, error.message, error.param)


@dataclass(slots=True)
class Delta:
    """What one round added to one request. Never changed: it is not frozen because that makes each one cost 2 µs more.

    tokens are new committed tokens; the first `kept` of them were drafted, out of `offered` that were checked.
    finish is set on the last delta of a request, exactly once, together with stats.
    stop_reason is the stop text or stop token id that ended it, if one did.
    logprobs has one entry per token where the request asked; prompt_logprobs, one per prompt token, come once, with
    the request's first delta. accepted_prediction and rejected_prediction are this round's share of what the stats
    count of the client's prediction.
    """

    request: RequestId
    tokens: tuple[int, ...]
    kept: int = 0
    offered: int = 0
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    stats: RequestStats | None = None
    failure: Failure | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    accepted_prediction: int = 0
    rejected_prediction: int = 0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a client may know of the served model.

    rules are those that a request may ask for, each with whether it is lossless; sources the speculators likewise.
    sampling is as its makers would have tokens drawn, where a request says nothing.
    """

    name: str
    created: int
    context_length: int
    vocab_size: int
    max_depth: int
    speculator: SourceName
    rules: Mapping[RuleName, bool] = field(default_factory=dict)
    sources: tuple[SourceName, ...] = ()
    sampling: Sampling = Sampling()


@dataclass(frozen=True, slots=True)
class Health:
    """status is "ok", "degraded" (the target serves, speculation is off), "starting", "draining" or "dead"."""

    status: Literal["ok", "degraded", "starting", "draining", "dead"]
    detail: str = ""
    running: int = 0
    waiting: int = 0


class EngineClient(Protocol):
    """All that the HTTP room knows of the engine."""

    @property
    def card(self) -> ModelCard:
        """The served model."""
        ...

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Admit a request and yield its deltas; the last one has `finish` set.

        Closing the iterator early cancels the request. Raises `Overloaded`, `Unavailable` or a `RequestError`
        before the first delta; a failure after that arrives as a last delta with `failure` set.
        """
        ...

    async def health(self) -> Health:
        """Cheap; never raises."""
        ...

    async def metrics(self, own: Snapshot) -> str:
        """The metrics of the engine and of all HTTP processes, one of which brings its own, as Prometheus text."""
        ...

    async def status(self) -> dict[str, Any]:
        """What the status page shows, as plain data. Raises Unavailable."""
        ...

    async def timeline(self) -> dict[str, Any]:
        """The last rounds on both devices, in Chrome's trace event format. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker found out when it loaded its model. Derived facts live here, never in the config.

    rules are those that a verifier judges by, each with whether it is lossless. Workers of the same place share their
    hardware. positional: its blocks hold all that it keeps of a request, so that another request may go on from them.
    memory holds bytes on its device by what they are for (weights, kv, logits, slots, graphs), and how many were free
    beside the weights; nothing for emulated devices. quantization is that of its weights.
    reads_hidden: a draft goes on from the target's hidden states, so only from a verdict. drafts: a target drafts
    itself what follows its verdicts. process names the process that holds the model; another one never has its name.
    """

    role: Role
    device: str
    blocks: int
    block_tokens: int
    context_length: int
    vocab_size: int
    weights_bytes: int
    load_s: float
    rules: Mapping[RuleName, bool] = field(default_factory=dict)
    place: str = ""
    positional: bool = True
    memory: Mapping[str, int] = field(default_factory=dict)
    quantization: str = "none"
    reads_hidden: bool = False
    drafts: bool = False
    process: str = ""


@dataclass(frozen=True, slots=True)
class AheadStats:
    """What drafting ahead of one verdict came to.

    hits and misses count rows for which outcomes had been drafted ahead, by whether the one that came was among them;
    unprepared rows had none. outcomes counts what was drafted ahead, over all rows.
    """

    hits: int = 0
    misses: int = 0
    unprepared: int = 0
    outcomes: int = 0


@dataclass(slots=True)
class RoundStats:
    """One round in numbers. Never changed, and no more frozen than `Delta`.

    Times are seconds; wall_s runs from the end of the round before, or from waking up.

    drafted_at[j] and kept_at[j] count rows that offered, and kept, a drafted token at chain position j.
    correction, bonus and plain count the tokens that the target chose itself: after a refused draft, after a whole
    kept chain, and without any draft.
    gaps counts the rows that got tokens and had some before, by (seconds since those, new tokens). fallbacks counts
    decode rows without a draft by reason. recomputed_tokens counts fed positions that the target had before, and lost.
    sources holds (offered, kept) drafted tokens by the speculator that requests had for their own, None: had none.
    """

    rows: int
    positions: int
    prefill_tokens: int
    wall_s: float
    draft_busy_s: float
    forward_s: float
    sampling_s: float
    drafted_at: tuple[int, ...]
    kept_at: tuple[int, ...]
    correction: int
    bonus: int
    plain: int
    gaps: Mapping[tuple[float, int], int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    ahead: AheadStats = AheadStats()
    recomputed_tokens: int = 0
    sources: Mapping[str | None, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class DeviceSpan:
    """One batch on one worker, in seconds of the coordinator's monotonic clock. Never changed, nor frozen: see `Delta`.

    sent_s and arrived_s are when the coordinator sent it and had the answer; the busy_s that the worker computed are
    taken to lie in the middle. rows and positions are what it computed.
    """

    role: Role
    number: int
    sent_s: float
    arrived_s: float
    busy_s: float
    rows: int
    positions: int

    @property
    def began_s(self) -> float:
        """When computing began."""
        return (self.sent_s + self.arrived_s - self.busy_s) / 2

    @property
    def ended_s(self) -> float:
        """When computing ended."""
        return (self.sent_s + self.arrived_s + self.busy_s) / 2


@dataclass(frozen=True, slots=True)
class PoolLevels:
    """How full the pools are between rounds. Of the held slots, some are leased to a plan or under verification."""

    running: int
    waiting: int
    slots_held: int
    slots_capacity: int
    target_blocks_held: int
    target_blocks_capacity: int
    draft_blocks_held: int
    draft_blocks_capacity: int
    slots_drafting: int = 0
    slots_verifying: int = 0
    target_blocks_cached: int = 0
    draft_blocks_cached: int = 0


@dataclass(slots=True)
class CacheStats:
    """What a prefix cache was asked for and had, in tokens of requests that began, and blocks that it gave up."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0
