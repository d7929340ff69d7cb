"""What a verdict adds to each request, and what is told of it once the next round is on its way."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from specserve.coordinator.batches import CheckedRow
from specserve.coordinator.blocks import BlockPool
from specserve.coordinator.endings import Cut, cut, goes_on
from specserve.coordinator.logprobs import RowScores
from specserve.coordinator.requests import RequestState, Stage
from specserve.coordinator.rounds import Round, lasts
from specserve.metrics import EngineMetrics
from specserve.text import Tokenizer
from specserve.transport.messages import Verdict
from specserve.types import AheadStats, Delta, Failure, FinishReason, RoundStats, WorkerInfo

log = logging.getLogger(__name__)

End = Callable[[RequestState, FinishReason, Delta | None, Failure | None], None]
"""Ends a request: why, what the last round added if anything, and the failure if that is why."""


@dataclass(slots=True)
class Commit:
    """One due row: the tokens that joined the answer; `kept` of them were drafted, the target confirmed `confirmed`.

    The path that the target took offered `offered` drafts, and `checked` were checked beside it, too. finish says why
    the answer ends here, if it does.
    """

    state: RequestState
    tokens: list[int]
    offered: int
    confirmed: int
    kept: int
    scores: RowScores
    checked: int
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    gap_s: float | None = None  # since the request's last tokens before these
    predicted: tuple[int, int] = (0, 0)  # tokens of the client's prediction that were accepted and rejected
    source: str | None = None  # the request's own speculator, where that made the drafts

    @property
    def chosen(self) -> Literal["plain", "bonus", "correction"]:
        """What the target's own token is."""
        return _chosen(self.offered, self.kept)

    def end(self, cut: Cut) -> None:
        """Nothing past the cut belongs to the answer."""
        self.finish, self.stop_reason = cut.finish, cut.stop_reason
        self.tokens = self.tokens[: cut.length]
        self.kept = min(self.confirmed, cut.length)

    def delta(self) -> Delta:
        """What the client is told."""
        state = self.state
        delta = Delta(state.request.id, tuple(self.tokens), self.kept, self.offered)
        delta.stop_reason = self.stop_reason
        delta.accepted_prediction, delta.rejected_prediction = self.predicted
        if self.scores:
            delta.logprobs = self.scores[: len(self.tokens)]
        if state.prompt_scores:
            delta.prompt_logprobs = state.report_prompt()
        return delta


@dataclass
class Verdicts:
    """A round that was committed, until it is booked."""

    round: Round
    verdict: Verdict
    commits: list[Commit]
    now_s: float
    draft_busy_s: float
    ahead: AheadStats

    def wasted(self) -> Mapping[str, int]:
        """Drafted tokens that were refused, and those that were confirmed behind the answer's end."""
        return {
            "rejected": sum([commit.checked - commit.confirmed for commit in self.commits]),
            "stop": sum([commit.confirmed - commit.kept for commit in self.commits]),
        }

    @cached_property
    def stats(self) -> RoundStats:
        """The round in numbers."""
        sent = self.round.sent
        made_alike = alike(self.commits)
        made = tallied(made_alike)
        return RoundStats(
            rows=len(sent.rows),
            positions=len(sent.feeds) + len(sent.chains),
            prefill_tokens=len(sent.feeds) - int(np.count_nonzero(sent.due)),
            sources=_by_source(made_alike),
            recomputed_tokens=sum([entry.again for entry in self.round.rows]),
            wall_s=self.now_s - self.round.began_s,
            draft_busy_s=self.draft_busy_s,
            forward_s=self.verdict.forward_s,
            sampling_s=self.verdict.sampling_s,
            drafted_at=made.drafted_at,
            kept_at=made.kept_at,
            correction=made.correction,
            bonus=made.bonus,
            plain=made.plain,
            gaps=Counter(
                [(each.gap_s, len(each.tokens)) for each in self.commits if each.gap_s is not None and each.tokens]
            ),
            fallbacks=self.round.fallbacks,
            ahead=self.ahead,
        )


class Tally(NamedTuple):
    """What the rows of a round made: drafts offered and kept by chain position, and the target's own tokens by kind."""

    drafted_at: tuple[int, ...]
    kept_at: tuple[int, ...]
    correction: int
    bonus: int
    plain: int


Alike = Mapping[tuple[str | None, int, int, int], int]
"""How often a round made the same: by source, drafts offered and kept, and tokens."""


def alike(commits: Sequence[Commit]) -> Alike:
    """Count commits by what they made: a round has few different ones."""
    return Counter([(each.source, each.offered, each.kept, len(each.tokens)) for each in commits])


def tallied(alike: Alike) -> Tally:
    """Count the drafts and tokens of a round's commits."""
    own = {"plain": 0, "bonus": 0, "correction": 0}
    offers, keeps = dict[int, int](), dict[int, int]()
    for (_, checked, confirmed, tokens), times in alike.items():
        own[_chosen(checked, confirmed)] += times * (tokens - confirmed)
        offers[checked] = offers.get(checked, 0) + times
        keeps[confirmed] = keeps.get(confirmed, 0) + times
    offered, kept = _beyond(offers), _beyond(keeps)
    return Tally(offered, kept + (0,) * (len(offered) - len(kept)), own["correction"], own["bonus"], own["plain"])


def _chosen(offered: int, kept: int) -> Literal["plain", "bonus", "correction"]:
    """What the target's own token is: without drafts, behind a whole kept chain, or behind a refused draft."""
    if not offered:
        return "plain"
    return "bonus" if kept == offered else "correction"


def _by_source(alike: Alike) -> Mapping[str | None, tuple[int, int]]:
    """Drafts offered and kept, by the request's own speculator that made them; None: the deployment's."""
    counts: dict[str | None, tuple[int, int]] = {}
    for (source, offered, kept, _), times in alike.items():
        if offered:
            before = counts.get(source, (0, 0))
            counts[source] = (before[0] + times * offered, before[1] + times * kept)
    return counts


def _beyond(times: Mapping[int, int]) -> tuple[int, ...]:
    """How many of these numbers, each there so many times, are larger than 0, 1, … up to the largest."""
    larger = [sum(times.values()) - times.get(0, 0)]
    for count in range(1, max(times, default=0)):
        larger.append(larger[-1] - times.get(count, 0))
    return tuple(larger) if larger[0] else ()


class Committer:
    """Turns verdicts into commits: it cuts at endings, and rewinds the target's KV to what is committed."""

    def __init__(
        self,
        target: WorkerInfo,
        tokenizer: Tokenizer,
        blocks: BlockPool,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        end: End,
    ) -> None:
        self._context = target.context_length
        self._tokenizer = tokenizer
        self._blocks = blocks
        self._metrics = metrics
        self._clock = clock
        self._end = end

    def apply(self, current: Round, verdict: Verdict, scores: Sequence[tuple[RowScores, RowScores]]) -> list[Commit]:
        """Commit a verdict that `Round.check` let pass; requests whose answer is complete end."""
        commits: list[Commit] = []
        surplus: list[int] = []
        now_s, block_tokens = self._clock(), self._blocks.block_tokens
        rows = zip(current.rows, lasts(verdict), verdict.next.tolist(), scores, strict=True)
        for entry, last, token, (logprobs, prompt_logprobs) in rows:
            state = entry.state
            state.suspect = False
            if state.stage is not Stage.RUNNING or state.epoch != entry.epoch:
                self._metrics.wasted("cancelled", len(entry.chain))
                continue
            if prompt_logprobs:
                state.score_prompt(entry.start + 1, prompt_logprobs)
            commit = self._commit(entry, last, token, logprobs, now_s) if entry.due else None
            if commit is not None:
                commits.append(commit)
            if commit is None or commit.finish is not None:
                state.target_cached = entry.start + entry.feed + (0 if commit is None else commit.kept)
            else:
                covered = state.target_cached = len(state.tokens) - 1
                if (len(state.target_table) - 1) * block_tokens >= covered:
                    surplus += self._blocks.trim(state.target_table, covered)
        self._blocks.free(surplus)
        for commit in commits:
            if commit.finish is not None:
                self._end(commit.state, commit.finish, commit.delta(), None)
        return commits

    def _commit(self, entry: CheckedRow, last: int, token: int, scores: RowScores, now_s: float) -> Commit | None:
        """Commit one due row; None when its request ended in an error instead."""
        state, chain = entry.state, entry.chain
        tokens = entry.emitted(last, token)
        kept = len(tokens) - 1
        commit = Commit(state, tokens, chain.reach(last), kept, kept, scores, len(chain.tokens))
        if not goes_on(state, tokens, self._context):
            try:
                commit.end(cut(state, tokens, self._tokenizer.end_tokens, self._context))
            except Exception as error:  # text is the request's own affair: what its stop texts provoke ends it alone
                log.exception("cannot look for the end of an answer")
                self._end(state, "error", None, Failure(500, "internal_error", f"{type(error).__name__}: {error}"))
                return None
        state.losses = 0
        if commit.tokens:
            commit.gap_s = state.tokens_came(now_s)
        commit.source = state.guessed_by  # another one may make the next chain before this is booked
        commit.predicted = state.take(commit.tokens, commit.checked, commit.kept)
        return commit
