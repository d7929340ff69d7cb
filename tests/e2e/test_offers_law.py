"""Where an adaptive depth cuts drafts by how sure they are, answers have exactly the target's distribution."""

from __future__ import annotations

import pytest
from test_distribution import engine, joint_law, p_value, pair, sample

from specserve.coordinator.adaptive_depth import AdaptiveDepth
from specserve.coordinator.drafting_switch import DraftingSwitch
from specserve.coordinator.round_costs import RoundCosts

assert pair  # the fixture: a tiny Llama and a draft that is another one

COUNT = 4000


@pytest.fixture
def dear_rows(monkeypatch):
    """Drafting stays on, and a token more takes a sixth of a request's plain round; how many were drafted, and left."""
    monkeypatch.setattr(DraftingSwitch, "advance", lambda self: bool(setattr(self, "on", True)))
    monkeypatch.setattr(DraftingSwitch, "consider_trial", lambda self, wanted, new: False)
    monkeypatch.setattr(RoundCosts, "plain_s", lambda self, rows: 1.0)
    monkeypatch.setattr(RoundCosts, "seconds", lambda self, rows, slots, hopes=0.0: 1 + slots / (6 * rows))
    deep = property(lambda self: self.depth, lambda self, levels: None)
    monkeypatch.setattr(AdaptiveDepth, "_levels", deep, raising=False)
    large = property(lambda self: self._shape.most_nodes, lambda self, nodes: None)
    monkeypatch.setattr(AdaptiveDepth, "_nodes", large, raising=False)
    counts = {"drafted": 0, "offered": 0}
    choose = AdaptiveDepth._choose_offered

    def counted(self, sure, told, rows, others):
        counts["drafted"] += sum(len(row.draft) for row in sure)
        choose(self, sure, told, rows, others)
        counts["offered"] += sum(len(row.draft) for row in sure)

    monkeypatch.setattr(AdaptiveDepth, "_choose_offered", counted)
    return counts


TREE = {"tree": "dynamic", "tree_nodes": 8, "tree_width": 3}


@pytest.mark.parametrize(("rule", "tree"), [("block", {}), ("rejection", TREE)])
def test_drafts_that_are_cut_keep_the_law(dear_rows, pair, rule, tree):
    """A good part of what is drafted is never checked; an answer's law is the target's, and not the draft's."""
    folders, (target, draft) = pair
    with engine(folders, rule, depth=4, depth_policy="adaptive", outcomes=0, draft_wait_s=60, **tree) as adaptive:
        found = sample(adaptive, COUNT, depth=4)
    assert 0.1 < dear_rows["offered"] / dear_rows["drafted"] < 0.9
    assert p_value(found, joint_law(target), COUNT) > 1e-4
    assert p_value(found, joint_law(draft), COUNT) < 1e-9
