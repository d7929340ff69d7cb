"""Where a row stands in its grammar, and what that does to its logits.

A constraint is kept like the row's KV: writing tokens at a position voids whatever lay past it. So a worker that
writes what it feeds and what it drafts, in that order, is right after any verdict, refill or restart, and needs to be
told of none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher

from specserve.errors import InvalidField, ProtocolError
from specserve.sampling import host
from specserve.sampling.grammar import Grammars, brief
from specserve.transport.messages import Array
from specserve.types import Structured


class Constraint:
    """One row's answer against its grammar. Not thread-safe; the grammar is compiled when it is first asked.

    tokens are those committed when the row was opened; the first prompt_length of them are not part of the answer.
    """

    def __init__(
        self, structured: Structured, grammars: Grammars | None, tokens: Sequence[int], prompt_length: int
    ) -> None:
        self._structured = structured
        self._grammars = grammars
        self._prompt_length = prompt_length
        self._answer = list(tokens[prompt_length:])
        self._matcher: LLMatcher | None = None
        self._read = 0  # answer tokens that the matcher has consumed

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """The tokens from absolute position `start` on are these, and nothing lies past them.

        Raises ProtocolError when the positions before `start` were never written.
        """
        at = start - self._prompt_length
        if at > len(self._answer):
            raise ProtocolError(f"tokens from position {start} on, but those before it are not known to the grammar")
        begin = max(at, 0)
        self._unread(begin)
        self._answer[begin:] = tokens[begin - at :]

    def _unread(self, length: int) -> None:
        if self._matcher is not None and self._read > length:
            self._matcher.rollback(self._read - length)
        self._read = min(self._read, length)

    @property
    def ended(self) -> bool:
        """An end token is the last thing that is written."""
        ends = frozenset() if self._grammars is None else self._grammars.end_tokens
        return bool(self._answer) and self._answer[-1] in ends

    def allowed(self) -> Array | None:
        """What may follow all that is written: uint8 [bytes], the low bit of byte 0 for token 0. Never all 0.

        None where the grammar refuses something written. After an end token, only end tokens.
        Raises InvalidField when matching exceeds its limits, or the grammar cannot be compiled.
        """
        matcher, grammars = self._opened()
        rest = self._answer[self._read :]
        text = next((i for i, token in enumerate(rest) if token in grammars.end_tokens), len(rest))
        consumed = matcher.try_consume_tokens(rest[:text])
        self._read += consumed
        bits = self._mask(matcher)
        if consumed < text:
            return None
        if text == len(rest):
            return bits
        ended = bits[rest[text] >> 3] >> (rest[text] & 7) & 1
        return grammars.ends() if ended and grammars.end_tokens.issuperset(rest[text:]) else None

    def _opened(self) -> tuple[LLMatcher, Grammars]:
        if self._grammars is None:
            raise ProtocolError("a structured request, but this worker was made without grammars")
        if self._matcher is None:
            self._matcher = self._grammars.matcher(self._structured)
        return self._matcher, self._grammars

    def _mask(self, matcher: LLMatcher) -> Array:
        bits: Array = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        reason = matcher.get_error() or ("" if bits.any() else "no token of this model can go on here")
        if reason:
            self._matcher, self._read = None, 0  # an error is for good, so that a later try needs a fresh one
            kind = self._structured.kind
            raise InvalidField(f"structured output: the {kind} cannot be followed: {brief(reason)}", param=kind)
        return bits


def restrict(logits: torch.Tensor, rows: Sequence[int], bits: Sequence[Array | None]) -> torch.Tensor:
    """Logits [m, V] whose `rows` are -inf wherever `bits`, one entry per row, allow no token. The input stays.

    Ids that the bits do not reach are not allowed. None allows nothing at all.
    """
    if not rows:
        return logits
    width = logits.shape[1]
    packed = np.zeros((len(rows), -(-width // 8)), dtype=np.uint8)
    for row, allowed in zip(packed, bits, strict=True):
        if allowed is not None:
            row[: len(allowed)] = allowed[: len(row)]
    on_device = host.send(packed, logits.device)
    ids = torch.arange(width, device=logits.device)
    allowed_ids = (on_device[:, ids >> 3] >> (ids & 7) & 1).bool()
    index = host.send(torch.tensor(rows), logits.device)
    return logits.index_copy(0, index, logits[index].masked_fill(~allowed_ids, -torch.inf))
