"""What a verdict adds to each request, and what is told of it once the next round is on its way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specserve.coordinator.endings import Cut
from specserve.coordinator.logprobs import RowScores
from specserve.coordinator.requests import RequestState
from specserve.coordinator.rounds import Round
from specserve.metrics import EngineMetrics
from specserve.transport.messages import Verdict
from specserve.types import Delta, FinishReason, RoundStats


@dataclass(slots=True)
class Commit:
    """One due row: the tokens that joined the answer; `kept` of them were drafted, the target confirmed `confirmed`.

    offered drafts were checked. cut says whether and why the answer ends here.
    """

    state: RequestState
    tokens: list[int]
    offered: int
    confirmed: int
    kept: int
    cut: Cut | None
    scores: RowScores

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer ends here; None when it goes on."""
        return None if self.cut is None else self.cut.finish

    def end(self, cut: Cut) -> None:
        """Nothing past the cut belongs to the answer."""
        self.cut = cut
        self.tokens = self.tokens[: cut.length]
        self.kept = min(self.confirmed, cut.length)

    def delta(self) -> Delta:
        """What the client is told."""
        state = self.state
        return Delta(
            state.request.id,
            tuple(self.tokens),
            self.kept,
            self.offered,
            stop_reason=None if self.cut is None else self.cut.stop_reason,
            logprobs=self.scores[: len(self.tokens)],
            prompt_logprobs=state.report_prompt() if state.prompt_scores else (),
        )


@dataclass(slots=True)
class Verdicts:
    """A round that was committed, until it is booked."""

    round: Round
    verdict: Verdict
    commits: list[Commit]
    now_s: float
    draft_busy_s: float

    def book(self, metrics: EngineMetrics) -> None:
        """Count it."""
        offered = np.array([commit.offered for commit in self.commits], dtype=np.int64)
        confirmed = np.array([commit.confirmed for commit in self.commits], dtype=np.int64)
        kept = np.array([commit.kept for commit in self.commits], dtype=np.int64)
        own = np.array([len(commit.tokens) for commit in self.commits], dtype=np.int64) - kept
        metrics.wasted("rejected", int((offered - confirmed).sum()))
        metrics.wasted("stop", int((confirmed - kept).sum()))
        metrics.round(self._stats(offered, kept, own))

    def _stats(self, offered: Counts, kept: Counts, own: Counts) -> RoundStats:
        sent, plain, whole = self.round.sent, offered == 0, kept == offered
        return RoundStats(
            rows=len(sent.rows),
            positions=len(sent.feeds) + len(sent.chains),
            prefill_tokens=len(sent.feeds) - int(sent.due.sum()),
            wall_s=self.now_s - self.round.began_s,
            draft_busy_s=self.draft_busy_s,
            forward_s=self.verdict.forward_s,
            sampling_s=self.verdict.sampling_s,
            drafted_at=_at_places(offered, offered),
            kept_at=_at_places(kept, offered),
            correction=int(own[~plain & ~whole].sum()),
            bonus=int(own[~plain & whole].sum()),
            plain=int(own[plain].sum()),
        )


Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


def _at_places(counts: Counts, offered: Counts) -> tuple[int, ...]:
    """How many rows count beyond place 0, 1, … of the longest chain that was offered."""
    places = np.arange(int(offered.max(initial=0)))
    return tuple((counts[:, None] > places).sum(0).tolist())
