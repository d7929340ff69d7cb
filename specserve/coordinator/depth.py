"""How many tokens to draft for a request in the next round."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.coordinator.requests import RequestState


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """The deployment's depth, or the request's own, within what can still be used.

    A drafted token is worth nothing past the answer's end, so depth ≤ tokens left − 1 and ≤ context left − 1, for the
    target's context and for the draft's own.
    """

    depth: int
    target_context: int
    draft_context: int | None

    def wanted(self, state: RequestState) -> int:
        """What the deployment or the request asks for; 0 means that drafts are never made for it."""
        return self.depth if state.request.depth is None else min(state.request.depth, self.depth)

    def of(self, state: RequestState) -> int:
        """The depth wanted for this request; 0 is plain decoding."""
        length = len(state.tokens)
        limits = [self.wanted(state), state.tokens_left - 1, self.target_context - length - 1]
        if self.draft_context is not None:
            limits.append(self.draft_context - length - 1)
        return max(0, min(limits))
