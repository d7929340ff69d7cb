"""Adaptive trees of every size in turn, whatever anything costs: so that a test sees all of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specserve.coordinator.adaptive_depth import AdaptiveDepth
from specserve.coordinator.requests import RequestState


def sizes_in_turn(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Each request's trees have 0, 1, 2, … nodes by round and row; returned is how many rounds had each size."""
    seen: dict[int, int] = {}

    def plan(self: AdaptiveDepth, states: Sequence[RequestState]) -> None:
        self._switch.on, self._switch.trial_left = True, 0
        shape = self._limits.tree
        for state in states:
            depth = self._limits.of(state)
            size = (state.rounds + state.row) % (shape.nodes(depth) + 1) if depth else 0
            self._slots[state.row], self._depths[state.row] = size, min(size, depth)
            seen[size] = seen.get(size, 0) + 1

    monkeypatch.setattr(AdaptiveDepth, "plan", plan)
    return seen
