"""From the columns of a verdict to one record per token."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.errors import ProtocolError
from specserve.transport.messages import Scores
from specserve.types import TokenLogprob

RowScores = tuple[TokenLogprob, ...]


def read(scores: Scores, tokens: Sequence[Sequence[int]]) -> list[RowScores]:
    """The scores of these tokens, row by row; a row that did not ask has no tokens here.

    Raises ProtocolError when the scores are of other tokens than these.
    """
    lengths = [len(each) for each in tokens]
    if scores.lengths.tolist() != (lengths if any(lengths) else []):
        raise ProtocolError(f"scores of {scores.lengths.tolist()} tokens per row, expected {lengths}")
    if not any(lengths):
        return [()] * len(lengths)
    widths = scores.widths.tolist()
    values, ids, tops = scores.logprobs.tolist(), scores.top_ids.tolist(), scores.top_logprobs.tolist()
    wanted = sum(length * width for length, width in zip(lengths, widths, strict=True))
    if len(values) != sum(lengths) or len(ids) != wanted or len(tops) != wanted:
        raise ProtocolError(f"{len(values)} scores with {len(ids)} alternatives for rows of {lengths} × {widths}")
    rows: list[RowScores] = []
    at = beside = 0
    for row, width in zip(tokens, widths, strict=True):
        found = []
        for token in row:
            alternatives = zip(ids[beside : beside + width], tops[beside : beside + width], strict=True)
            found.append(TokenLogprob(token, values[at], tuple(alternatives)))
            at, beside = at + 1, beside + width
        rows.append(tuple(found))
    return rows
