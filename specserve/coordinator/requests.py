"""What the coordinator knows of one request. Workers hold copies that may vanish; this is the truth."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile
from typing import Literal

from specserve.coordinator.block_keys import BlockKeys
from specserve.coordinator.blocks import empty_table
from specserve.coordinator.chain import NOTHING, Chain
from specserve.text import Detokenizer, StopText, Tokenizer
from specserve.types import Request, RequestStats, RowId, TokenLogprob

MOST_LOSSES = 3
"""Verifiers that may die while they work on a request, without one more token of it: it may be what ends them."""


class Stage(Enum):
    """Where a request stands. A request moves WAITING → RUNNING (→ WAITING when preempted) → ENDED, once."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True)
class StopScan:
    """Incremental text of a request that has stop strings."""

    detokenizer: Detokenizer
    stops: StopText

    def read(self, token: int, *, searched: bool) -> str | None:
        """The stop text that this token completes, if there is one and it is looked for."""
        text = self.detokenizer.push(token)
        return self.stops.push(text)[1] if searched else None


@dataclass(slots=True)
class RequestState:
    """One admitted request.

    tokens are committed. The newest one is never in a worker's KV: between rounds the target covers
    target_cached ≤ len(tokens) − 1 positions, and exactly that many once the prompt is in (invariant I2).
    draft_cached is what the draft worker covers; it may lag.
    """

    row: RowId
    request: Request
    owner: str
    arrived_s: float
    tokens: list[int]
    stop_scan: StopScan | None
    end_tokens: frozenset[int] = frozenset()  # ids that end this answer
    stage: Stage = Stage.WAITING
    epoch: int = 0
    target_cached: int = 0
    target_lost: int = 0  # positions from 0 on that the target had, before it lost them
    draft_cached: int = 0
    draft_origin: int = 0  # the first position that the draft may read of this request
    target_table: array[int] = field(default_factory=empty_table)
    draft_table: array[int] = field(default_factory=empty_table)
    chain: Chain = NOTHING  # drafted behind the newest token
    target_opened: tuple[int, int] | None = None  # (life, epoch) that the verifier was told of
    draft_opened: tuple[int, int] | None = None
    draft_known: int = 0  # committed tokens that the draft worker was told of, by `Open` or by a plan ahead
    suspect: bool = False  # a batch that it was in failed as a whole: it is tried alone
    losses: int = 0  # of verifiers that died while they worked on it, since its last token
    told: bool = False  # of tokens that were committed here
    said_to_wait: bool = False  # its owner knows that nothing is done for it
    cached_prompt: int | None = None  # prompt tokens that were cached when it first began; None before that
    queued_s: float = 0.0  # when it came here; arrived_s may have been before that
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    rounds: int = 0
    drafted: int = 0
    kept: int = 0
    histogram: list[int] = field(default_factory=list)
    prompt_scores: list[TokenLogprob] = field(default_factory=list)  # of the first prompt tokens, until reported
    prompt_scored: int = 1  # nothing precedes the first token
    guessed_by: str | None = None  # the speculator of its own that made its chain; None: the deployment's, or nobody
    predicted: list[int] = field(default_factory=list)  # what the client's prediction says of this round
    accepted_prediction: int = 0
    rejected_prediction: int = 0
    trace: str | None = None  # traceparent of its span here, where it is traced
    longest: int = field(init=False)  # tokens when max_tokens are used up
    scored: bool = field(init=False)  # log-probabilities were asked for
    keys: BlockKeys = field(init=False)  # of its full blocks

    def __post_init__(self) -> None:
        self.keys = BlockKeys(self.tokens, self.request.cache_salt)
        self.scored = self.request.logprobs is not None or self.request.prompt_logprobs is not None
        self.longest = len(self.request.prompt) + self.request.max_tokens

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def tokens_left(self) -> int:
        """Tokens that max_tokens still allows."""
        return self.longest - len(self.tokens)

    @property
    def decoding(self) -> bool:
        """Everything but the newest token is cached: the next row is a decode row."""
        return self.target_cached == len(self.tokens) - 1

    @property
    def alone(self) -> bool:
        """It is tried alone and without drafts, so that it harms nobody if it is what failed, or died, before."""
        return self.suspect or self.losses >= MOST_LOSSES - 1

    @property
    def place(self) -> Literal["queued", "prefill", "decode"]:
        """How far it is: waiting for a place, without a token of its answer, or within it."""
        if self.generated:
            return "decode"
        return "queued" if self.stage is Stage.WAITING else "prefill"

    def lose_target(self, covered: int = 0) -> None:
        """The target has no more than the first `covered` positions left."""
        self.target_lost = max(self.target_lost, self.target_cached)
        self.target_cached = covered

    def again(self, start: int, feed: int) -> int:
        """How many of these positions the target had before."""
        return 0 if self.target_lost <= start else min(self.target_lost - start, feed)

    def tokens_came(self, now_s: float) -> float | None:
        """Note that tokens were committed now; the seconds since those before, None for the first ones."""
        before, self.last_token_s = self.last_token_s, now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        return None if before is None else now_s - before

    def score_prompt(self, start: int, scores: Sequence[TokenLogprob]) -> None:
        """Take the scores of prompt tokens from absolute position `start` on; those taken before are left out."""
        new = scores[self.prompt_scored - start :]
        self.prompt_scores += new
        self.prompt_scored += len(new)

    def report_prompt(self) -> tuple[TokenLogprob, ...]:
        """The prompt's scores, once."""
        scores, self.prompt_scores = tuple(self.prompt_scores), []
        return scores

    def take(self, tokens: Sequence[int], checked: int, kept: int) -> tuple[int, int]:
        """Commit tokens, which a round made with `kept` of `checked` drafts.

        Returns how many tokens of the client's prediction it accepted and rejected.
        """
        predicted = self.count_prediction(checked, tokens) if self.predicted else (0, 0)
        self.tokens += tokens
        self.rounds += 1
        self.drafted += checked
        self.kept += kept
        if len(self.histogram) <= kept:
            self.histogram.extend([0] * (kept + 1 - len(self.histogram)))
        self.histogram[kept] += 1
        return predicted

    def count_prediction(self, offered: int, tokens: Sequence[int]) -> tuple[int, int]:
        """Book what this round's tokens make of the client's prediction, of which `offered` tokens were drafts."""
        predicted, self.predicted = self.predicted, []
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(predicted, tokens, strict=False)))
        refused = max(0, offered - agreed)
        self.accepted_prediction += agreed
        self.rejected_prediction += refused
        return agreed, refused

    def resume(self, before: RequestStats) -> None:
        """Go on with the books of a lost coordinator, as the request's ingress kept them."""
        self.arrived_s -= before.total_s
        if before.generated_tokens:
            self.first_token_s = self.arrived_s + before.first_token_s
            self.target_lost = len(self.tokens) - 1
            self.cached_prompt = before.cached_tokens
        self.rounds, self.drafted, self.kept = before.rounds, before.drafted_tokens, before.kept_tokens
        self.histogram = list(before.histogram)
        self.accepted_prediction = before.accepted_prediction_tokens
        self.rejected_prediction = before.rejected_prediction_tokens

    def stats(self, now_s: float) -> RequestStats:
        """The request's costs as of now."""
        started = now_s if self.started_s is None else self.started_s
        first = now_s if self.first_token_s is None else self.first_token_s
        return RequestStats(
            prompt_tokens=len(self.request.prompt),
            generated_tokens=self.generated,
            rounds=self.rounds,
            drafted_tokens=self.drafted,
            kept_tokens=self.kept,
            histogram=tuple(self.histogram),
            queue_s=started - self.queued_s,
            first_token_s=first - self.arrived_s,
            total_s=now_s - self.arrived_s,
            accepted_prediction_tokens=self.accepted_prediction,
            rejected_prediction_tokens=self.rejected_prediction,
            cached_tokens=self.cached_prompt or 0,
        )


def admitted(row: RowId, request: Request, owner: str, tokenizer: Tokenizer, now_s: float) -> RequestState:
    """The state of a request that has just come in."""
    end_tokens = frozenset(request.stop_token_ids)
    if not request.ignore_eos:
        end_tokens |= tokenizer.end_tokens
    return RequestState(
        row=row,
        request=request,
        owner=owner,
        arrived_s=now_s,
        queued_s=now_s,
        tokens=[*request.prompt, *request.answer],
        stop_scan=_stop_scan(request, tokenizer) if request.stop else None,
        end_tokens=end_tokens,
        prompt_scores=[] if request.prompt_logprobs is None else [TokenLogprob(request.prompt[0], None)],
    )


def _stop_scan(request: Request, tokenizer: Tokenizer) -> StopScan:
    """The scan behind the tokens that the answer has already, none of which completed a stop text."""
    scan = StopScan(Detokenizer(tokenizer), StopText(request.stop))
    for index, token in enumerate(request.answer):
        scan.read(token, searched=index >= request.sampling.min_tokens)
    return scan
