"""A round in flight, and whether an answer can be one to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat

from specserve.coordinator.batches import CheckedRow
from specserve.coordinator.chain import NOTHING
from specserve.coordinator.logprobs import RowScores, read
from specserve.coordinator.refcounts import Ids
from specserve.coordinator.requests import RequestState, Stage
from specserve.coordinator.scheduler import TargetRow
from specserve.errors import ProtocolError
from specserve.transport.messages import Cannot, Verdict, Verify


@dataclass(slots=True)
class Round:
    """The batch that the verifier is computing: its rows, and the same in columns as they were sent."""

    sent: Verify
    rows: list[CheckedRow]
    slots: Ids  # of all chains; the round holds a reference to each
    began_s: float
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """What its verdict must name."""
        return self.sent.round

    def names(self, state: RequestState) -> bool:
        """Whether a request takes part."""
        return any(entry.state is state for entry in self.rows)

    def check(self, verdict: Verdict, vocab_size: int) -> None:
        """Raise ProtocolError unless the verdict answers exactly these rows with possible values (invariant I1)."""
        if verdict.rows.tolist() != self.sent.rows.tolist():
            raise ProtocolError(f"verdict for round {self.number} names other rows than the round")
        if verdict.kept.shape != verdict.rows.shape or verdict.next.shape != verdict.rows.shape:
            raise ProtocolError(f"verdict for round {self.number} has columns of unequal length")
        if verdict.last.shape != (verdict.rows.shape if len(self.sent.parents) else (0,)):
            raise ProtocolError(f"verdict for round {self.number} does not name the last kept node of each tree")
        kept = verdict.kept.tolist()
        for entry, last, count, token in zip(self.rows, lasts(verdict), kept, verdict.next.tolist(), strict=True):
            if not -1 <= last < len(entry.chain.tokens) or entry.chain.length(last) != count:
                raise ProtocolError(f"{count} tokens kept up to number {last} of {len(entry.chain)} drafted ones")
            if entry.due and not 0 <= token < vocab_size:
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
        sent = {int(entry.state.row): entry for entry in self.rows}
        named = zip(cannot.rows.tolist(), cannot.epochs.tolist(), cannot.covered.tolist(), strict=True)
        for row, epoch, covered in named:
            if row not in sent or epoch != sent[row].epoch:
                raise ProtocolError(f"cannot for round {self.number} names row {row} of epoch {epoch}, not sent")
            if not 0 <= covered < sent[row].start:
                raise ProtocolError(f"row {row} was to start at {sent[row].start}, and covers {covered}")
        return dict(zip(cannot.rows.tolist(), cannot.covered.tolist(), strict=True))

    def scores(self, verdict: Verdict) -> list[tuple[RowScores, RowScores]]:
        """Per row, the scores of its emitted tokens and of its prompt tokens, where they were asked for.

        For a verdict that `check` let pass. Raises ProtocolError when the scores are of other tokens.
        """
        if not any(entry.state.scored for entry in self.rows) and not len(verdict.scores.lengths):
            return list(repeat(((), ()), len(self.rows)))
        emitted = [
            entry.emitted(last, token) if entry.due and entry.state.request.logprobs is not None else []
            for entry, last, token in zip(self.rows, lasts(verdict), verdict.next.tolist(), strict=True)
        ]
        prompts = [entry.scored_prompt() for entry in self.rows]
        return list(zip(read(verdict.scores, emitted), read(verdict.prompt_scores, prompts), strict=True))


def lasts(verdict: Verdict) -> list[int]:
    """The last kept drafted token of each row, −1 for none."""
    numbers: list[int] = (verdict.last if len(verdict.last) else verdict.kept - 1).tolist()
    return numbers


def checked_rows(
    rows: Iterable[TargetRow],
    *,
    shows: Callable[[RequestState, int], int] | None,
    next_depth: Callable[[RequestState], int] | None,
) -> list[CheckedRow]:
    """The planned rows that are still wanted, each with the chain that is drafted for it now.

    shows: of how many of a request's tokens, up to the position it is given, hidden states are wanted of the target,
    None where nobody reads them. next_depth: how many tokens the verifier is to draft behind its verdict, None where
    it does not.
    """
    return [
        CheckedRow(
            row.state,
            row.state.epoch,
            row.start,
            row.feed,
            row.due,
            len(row.state.tokens),
            row.draft if row.due else NOTHING,
            0 if shows is None else min(row.feed, shows(row.state, row.start + row.feed)),
            None if next_depth is None else next_depth(row.state),
            row.state.again(row.start, row.feed) if row.state.target_lost else 0,
        )
        for row in rows
        if row.state.stage is Stage.RUNNING and row.state.target_cached == row.start
    ]
