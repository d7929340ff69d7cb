"""What is known to go wrong around a lossless rule, through the whole engine: the engine's own proof notices it.

`verification/test_rule_laws.py` shows the same by enumeration, `test_rules_end_to_end.py` noise that is shared.
"""

from __future__ import annotations

import pytest
import torch
from test_rules_end_to_end import SAMPLE, p_value, transitions

from specserve.drafting import _chains
from specserve.drafting.workspace import Workspace
from specserve.verification import all_rules

RATIO_RULES = sorted(name for name, rule in all_rules().items() if rule.LOSSLESS and rule.NEEDS_DISTS)
TOP_P, UNSURE = 0.8, 0.15


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_filtered_drafts_have_the_filtered_targets_law(rule: str) -> None:
    """Under top-p, as served: what the variant below breaks is right here."""
    assert p_value(transitions(rule, SAMPLE, top_p=TOP_P), TOP_P) > 1e-3


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_unfiltered_draft_rows_are_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens drawn after top-p, and shipped with dists as they were before it."""
    unfiltered: list[torch.Tensor] = []
    process, draw = _chains.process, Workspace.draw

    def remembering(logits, temperature, top_p, *more):
        unfiltered.append(process(logits.clone(), temperature, torch.ones_like(top_p), *more))
        return process(logits, temperature, top_p, *more)

    def shipping(self, slots, noise):
        tokens = draw(self, slots, noise)
        self.put(slots, unfiltered[-1])
        return tokens

    monkeypatch.setattr(_chains, "process", remembering)
    monkeypatch.setattr(Workspace, "draw", shipping)
    assert p_value(transitions(rule, SAMPLE, top_p=TOP_P), TOP_P) < 1e-6


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_dropping_drafts_of_low_confidence_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that ends before the first token of which its draft was unsure."""
    pick = _chains.Picker.pick

    def choosy(self, rows, logits):
        dists = torch.softmax(logits, -1)
        pick(self, rows, logits)
        for row, dist in zip(rows, dists, strict=True):
            chain = self._chains[row]
            if dist[chain.tokens[-1]] < UNSURE:
                chain.healthy = min(chain.healthy, len(chain.tokens) - 1)

    monkeypatch.setattr(_chains.Picker, "pick", choosy)
    assert p_value(transitions(rule, SAMPLE)) < 1e-6
