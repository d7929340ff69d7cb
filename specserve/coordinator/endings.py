"""Exact endings: where a run of emitted tokens must be cut, decided before anything is committed.

Tokens are scanned in order. An end token or stop id ends the answer before itself; a stop text ends it with the token
that completes the text (the text after it is the reader's to cut), searched in the text of the tokens after the first
min_tokens; max_tokens and the context end it by length. What
comes first wins; a stop and a limit at the same token are a stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.coordinator.requests import RequestState
from specserve.types import FinishReason


@dataclass(frozen=True, slots=True)
class Cut:
    """How many of the emitted tokens belong to the answer, and whether and why it ends there."""

    length: int
    finish: FinishReason | None = None
    stop_reason: int | str | None = None


def goes_on(state: RequestState, emitted: Sequence[int], context_length: int) -> bool:
    """Nothing in these tokens can end the answer: a glance that spares most rounds of most requests the scan."""
    length = len(state.tokens) + len(emitted)
    short = length < state.longest and length < context_length
    return short and state.stop_scan is None and state.end_tokens.isdisjoint(emitted)


def cut(state: RequestState, emitted: Sequence[int], end_tokens: frozenset[int], context_length: int) -> Cut:
    """Find the end of the answer in `emitted`, if it is there. Advances the state's stop scan over what is kept."""
    room = min(state.tokens_left, context_length - len(state.tokens))
    stop_ids = state.request.stop_token_ids
    for index, token in enumerate(emitted):
        if index >= room:
            break
        if token in stop_ids or (token in end_tokens and not state.request.ignore_eos):
            return Cut(index, "stop", token)
        searched = state.generated + index >= state.request.sampling.min_tokens
        matched = None if state.stop_scan is None else state.stop_scan.read(token, searched=searched)
        if matched is not None:
            return Cut(index + 1, "stop", matched)
    if len(emitted) >= room:
        return Cut(room, "length")
    return Cut(len(emitted))
