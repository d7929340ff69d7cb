"""Requests of one family have the same prompt: one fills it, the others take its full blocks over by reference."""

from __future__ import annotations

from collections.abc import Iterable

from specserve.coordinator.requests import RequestState


def shareable(state: RequestState, block_tokens: int, spare: int = 0) -> int:
    """Positions of the prompt in full blocks; its newest token is always fed. 0 for requests that feed all of it.

    `spare` blocks at the end are left out.
    """
    if state.request.family is None or state.request.prompt_logprobs is not None:
        return 0
    return max(0, (len(state.request.prompt) - 1) // block_tokens - spare) * block_tokens


def siblings(state: RequestState, among: Iterable[RequestState]) -> list[RequestState]:
    """The other requests of the family, in order. A family name with another prompt shares nothing."""
    mine = state.request
    return [
        other
        for other in among
        if other.request.family == mine.family and other is not state and other.request.prompt == mine.prompt
    ]


def reusable(state: RequestState) -> bool:
    """Whether the target may go on from cached KV: it has none yet, and no prompt token is to be scored."""
    return not state.target_table and state.request.prompt_logprobs is None
