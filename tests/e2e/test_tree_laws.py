"""Answers drafted as trees have exactly the target's distribution, end to end, and mistakes would show."""

from __future__ import annotations

import pytest
import torch
from sizes_in_turn import sizes_in_turn
from test_distribution import engine, joint_law, p_value, pair, sample

from specserve.drafting import _trees
from specserve.drafting.workspace import Workspace
from specserve.models import paged_transformers

assert pair  # the fixture: a tiny Llama and a draft that is another one

SHAPES = {
    "static": {"tree": [2, 2], "depth": 3},
    "dynamic": {"tree": "dynamic", "tree_nodes": 6, "tree_width": 2, "depth": 3},
}
RULES = ["rejection", "exact", "coupled"]


def found(folders, rule, shape, count, temperature=1.0):
    with engine(folders, rule, **SHAPES[shape]) as running:
        counts = sample(running, count, depth=None, temperature=temperature)
        assert running.levels().slots_held == 0
    return counts


@pytest.mark.parametrize(
    ("rule", "shape", "temperature", "count"),
    [
        ("rejection", "static", 1.0, 2_500),
        ("rejection", "dynamic", 0.7, 2_500),
        ("coupled", "static", 0.7, 1_200),
        ("exact", "dynamic", 1.0, 1_200),
        *(
            pytest.param(rule, shape, temperature, 30_000, marks=pytest.mark.full)
            for rule in RULES
            for shape in SHAPES
            for temperature in (0.7, 1.0)
        ),
    ],
)
def test_continuations_have_the_targets_law(pair, rule, shape, temperature, count):
    """243 cells, 64 requests at once, real attention over trees; the draft's law does not fit the same numbers."""
    folders, models = pair
    counts = found(folders, rule, shape, count, temperature)
    assert p_value(counts, joint_law(models[0], temperature), count) > 1e-3
    assert p_value(counts, joint_law(models[1], temperature), count) < 1e-9


@pytest.mark.parametrize(
    ("rule", "shape", "count"),
    [
        ("rejection", "dynamic", 2_500),
        *(pytest.param(rule, shape, 30_000, marks=pytest.mark.full) for rule in RULES for shape in SHAPES),
    ],
)
def test_trees_of_every_size_have_the_targets_law(pair, monkeypatch, rule, shape, count):
    """0, 1, 2, … nodes in turn, 64 requests at once."""
    folders, models = pair
    seen = sizes_in_turn(monkeypatch)
    with engine(folders, rule, depth_policy="adaptive", **SHAPES[shape]) as running:
        counts = sample(running, count, depth=None, temperature=0.7)
        assert running.levels().slots_held == 0
    assert len(seen) >= 6
    assert p_value(counts, joint_law(models[0], 0.7), count) > 1e-3
    assert p_value(counts, joint_law(models[1], 0.7), count) < 1e-9


def likeliest_siblings(self, slots, noise):
    """Not drawn: simply the likeliest tokens, as a tree without noise would have them."""
    return self._dists._probs[torch.from_numpy(slots.astype("int64"))].topk(noise.shape[1], -1).indices


def siblings_of_one_noise(real):
    def uniform(seeds, purpose, positions, branches, places):
        return real(seeds, purpose, positions, branches, places * 0).expand(-1, places.shape[1])

    return uniform


BROKEN = {
    "siblings of one noise": (_trees, "uniform", siblings_of_one_noise(_trees.uniform)),
    "the likeliest siblings": (Workspace, "draw_siblings", likeliest_siblings),
    "kept paths that are not moved": (paged_transformers.PagedTransformers, "move", lambda self, moves: None),
}


@pytest.mark.parametrize(
    ("mistake", "count"),
    [
        ("siblings of one noise", 1_200),
        ("the likeliest siblings", 1_200),
        *(pytest.param(mistake, 6_000, marks=pytest.mark.full) for mistake in BROKEN),
    ],
)
def test_wrong_siblings_and_a_wrong_path_are_noticed(pair, monkeypatch, mistake, count):
    """Tokens offered as if drawn that were not, or not on their own, and paths that stay where they were."""
    folders, models = pair
    monkeypatch.setattr(*BROKEN[mistake])
    assert p_value(found(folders, "rejection", "static", count), joint_law(models[0]), count) < 1e-4
