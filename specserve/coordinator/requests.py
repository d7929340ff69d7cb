"""What the coordinator knows of one request. Workers hold copies that may vanish; this is the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile

from specserve.coordinator.trie import Trie
from specserve.text import Detokenizer, StopText
from specserve.types import Request, RequestStats, RowId, TokenLogprob


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
    trie: Trie
    arrived_s: float
    tokens: list[int]
    stop_scan: StopScan | None
    end_tokens: frozenset[int] = frozenset()  # ids that end this answer
    stage: Stage = Stage.WAITING
    epoch: int = 0
    target_cached: int = 0
    draft_cached: int = 0
    target_table: list[int] = field(default_factory=list)
    draft_table: list[int] = field(default_factory=list)
    target_opened: tuple[int, int] | None = None  # (life, epoch) that the verifier was told of
    draft_opened: tuple[int, int] | None = None
    suspect: bool = False  # a batch that it was in failed as a whole: it is tried alone
    in_flight: bool = False  # named by the batch that the verifier is computing
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    rounds: int = 0
    drafted: int = 0
    kept: int = 0
    histogram: list[int] = field(default_factory=list)
    prompt_scores: list[TokenLogprob] = field(default_factory=list)  # of the first prompt tokens, until reported
    prompt_scored: int = 1  # nothing precedes the first token
    predicted: list[int] = field(default_factory=list)  # what the client's prediction says of this round
    accepted_prediction: int = 0
    rejected_prediction: int = 0

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def tokens_left(self) -> int:
        """Tokens that max_tokens still allows."""
        return self.request.max_tokens - self.generated

    @property
    def decoding(self) -> bool:
        """Everything but the newest token is cached: the next row is a decode row."""
        return self.target_cached == len(self.tokens) - 1

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

    def count_round(self, offered: int, kept: int) -> None:
        """Book one round that made tokens."""
        self.rounds += 1
        self.drafted += offered
        self.kept += kept
        if len(self.histogram) <= kept:
            self.histogram.extend([0] * (kept + 1 - len(self.histogram)))
        self.histogram[kept] += 1

    def count_prediction(self, offered: int, tokens: Sequence[int]) -> None:
        """Book what this round's tokens make of the client's prediction, of which `offered` tokens were drafts."""
        predicted, self.predicted = self.predicted, []
        if predicted:
            agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(predicted, tokens, strict=False)))
            self.accepted_prediction += agreed
            self.rejected_prediction += max(0, offered - agreed)

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
            queue_s=started - self.arrived_s,
            first_token_s=first - self.arrived_s,
            total_s=now_s - self.arrived_s,
            accepted_prediction_tokens=self.accepted_prediction,
            rejected_prediction_tokens=self.rejected_prediction,
        )
