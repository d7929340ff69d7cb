"""A round in flight, and its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specserve.coordinator.batches import CheckedRow
from specserve.coordinator.logprobs import RowScores, read
from specserve.coordinator.trie import NO_SLOT
from specserve.errors import ProtocolError
from specserve.transport.messages import Cannot, Verdict
from specserve.types import AheadStats, RoundStats


@dataclass(slots=True)
class Tally:
    """What the decode rows of one round made."""

    drafted_at: list[int] = field(default_factory=list)
    kept_at: list[int] = field(default_factory=list)
    correction: int = 0
    bonus: int = 0
    plain: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)

    def arrived(self, gap_s: float | None, tokens: int) -> None:
        """One row got tokens, so long after those that it got before, if any."""
        if gap_s is not None:
            self.gaps.append((gap_s, tokens))

    def add(self, offered: int, kept: int, own: int) -> None:
        """One row: `offered` drafts, the first `kept` committed, and `own` (0 or 1) tokens of the target itself."""
        if len(self.drafted_at) < offered:
            grow = [0] * (offered - len(self.drafted_at))
            self.drafted_at += grow
            self.kept_at += grow
        for position in range(offered):
            self.drafted_at[position] += 1
            self.kept_at[position] += position < kept
        if offered == 0:
            self.plain += own
        elif kept == offered:
            self.bonus += own
        else:
            self.correction += own


@dataclass(slots=True)
class Round:
    """The batch that the verifier is computing."""

    number: int
    rows: list[CheckedRow]
    began_s: float
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """What the target computes: feeds and chains."""
        return sum(entry.row.feed + len(entry.chain) for entry in self.rows)

    @property
    def slots(self) -> int:
        """Draft slots that the batch names."""
        return sum(link.slot != NO_SLOT for entry in self.rows for link in entry.chain)

    def check(self, verdict: Verdict, vocab_size: int) -> None:
        """Raise ProtocolError unless the verdict answers exactly these rows with possible values (invariant I1)."""
        if verdict.rows.tolist() != [entry.row.state.row for entry in self.rows]:
            raise ProtocolError(f"verdict for round {self.number} names other rows than the round")
        if verdict.kept.shape != verdict.rows.shape or verdict.next.shape != verdict.rows.shape:
            raise ProtocolError(f"verdict for round {self.number} has columns of unequal length")
        for entry, kept, token in zip(self.rows, verdict.kept.tolist(), verdict.next.tolist(), strict=True):
            if not 0 <= kept <= len(entry.chain):
                raise ProtocolError(f"{kept} tokens kept of a chain of {len(entry.chain)}")
            if entry.row.due and not 0 <= token < vocab_size:
                raise ProtocolError(f"token {token} is outside the vocabulary of {vocab_size}")

    def check_cannot(self, cannot: Cannot) -> dict[int, int]:
        """The positions that the verifier still covers, by row.

        Raises ProtocolError unless they are fewer than each row was to start at, as nothing would be gained then.
        """
        if (
            not len(cannot.rows)
            or cannot.covered.shape != cannot.rows.shape
            or cannot.epochs.shape != cannot.rows.shape
        ):
            raise ProtocolError(f"cannot for round {self.number} names no rows, or has columns of unequal length")
        sent = {int(entry.row.state.row): entry for entry in self.rows}
        named = zip(cannot.rows.tolist(), cannot.epochs.tolist(), cannot.covered.tolist(), strict=True)
        for row, epoch, covered in named:
            if row not in sent or epoch != sent[row].epoch:
                raise ProtocolError(f"cannot for round {self.number} names row {row} of epoch {epoch}, not sent")
            if not 0 <= covered < sent[row].row.start:
                raise ProtocolError(f"row {row} was to start at {sent[row].row.start}, and covers {covered}")
        return dict(zip(cannot.rows.tolist(), cannot.covered.tolist(), strict=True))

    def scores(self, verdict: Verdict) -> list[tuple[RowScores, RowScores]]:
        """Per row, the scores of its emitted tokens and of its prompt tokens, where they were asked for.

        For a verdict that `check` let pass. Raises ProtocolError when the scores are of other tokens.
        """
        emitted = [
            entry.emitted(kept, token) if entry.row.due and entry.row.state.request.logprobs is not None else []
            for entry, kept, token in zip(self.rows, verdict.kept.tolist(), verdict.next.tolist(), strict=True)
        ]
        prompts = [entry.scored_prompt() for entry in self.rows]
        return list(zip(read(verdict.scores, emitted), read(verdict.prompt_scores, prompts), strict=True))

    def stats(self, verdict: Verdict, tally: Tally, draft_busy_s: float, now_s: float) -> RoundStats:
        """The round's numbers once it is committed."""
        prefill = sum(entry.row.feed - entry.row.due for entry in self.rows)
        return RoundStats(
            rows=len(self.rows),
            positions=self.positions,
            prefill_tokens=prefill,
            wall_s=now_s - self.began_s,
            draft_busy_s=draft_busy_s,
            forward_s=verdict.forward_s,
            sampling_s=verdict.sampling_s,
            drafted_at=tuple(tally.drafted_at),
            kept_at=tuple(tally.kept_at),
            correction=tally.correction,
            bonus=tally.bonus,
            plain=tally.plain,
            gaps=tuple(tally.gaps),
            fallbacks=self.fallbacks,
            ahead=AheadStats(unprepared=sum(entry.row.due for entry in self.rows)),
        )
