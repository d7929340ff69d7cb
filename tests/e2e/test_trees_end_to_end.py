"""Drafted trees through the whole engine: one answer whatever the shape, nothing held after, chains beside trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sizes_in_turn import sizes_in_turn
from test_rules_end_to_end import COUNT, LENGTH, MarkovBackend, answers, engine_of, request

from specserve.errors import ConfigError, InvalidField
from specserve.models import HoldsTrees
from specserve.verification import tree_judges

SHAPES = {
    "static": {"depth": 3, "tree": [3, 2, 1]},
    "ragged": {"depth": 5, "tree": "dynamic", "tree_nodes": 9, "tree_width": 3},
    "wide": {"depth": 1, "tree": [6]},
    "short": {"depth": 4, "tree": [2], "slots": 40, "max_batch_tokens": 65 * 4},
}
RULES = sorted(tree_judges())


def settled(engine) -> None:
    """The books add up, and nothing is held."""
    assert engine._loop.call(lambda: (engine._engine.check(), True)[1]).result()
    levels = engine.levels()
    assert levels.slots_held == levels.target_blocks_held == levels.draft_blocks_held == 0


@pytest.fixture(scope="module")
def plain():
    """What the target says alone, without speculation, one request at a time."""
    with engine_of(draft_seed=None, depth=1) as engine:
        said = {
            rule: {n: answers(engine, rule, [n], depth=0)[n] for n in range(COUNT)} for rule in ("coupled", "exact")
        }
        greedy = {n: answers(engine, None, [n], depth=0, temperature=0)[n] for n in range(COUNT)}
        return said | {"greedy": greedy}


@pytest.mark.parametrize("shape", ["static", "ragged", *(pytest.param(s, marks=pytest.mark.full) for s in SHAPES)])
def test_greedy_and_seeded_answers_are_those_of_the_target_alone(plain, shape) -> None:
    """Any shape and rule, all requests at once, pages that check every history: the tokens are those without drafts."""
    with engine_of(**SHAPES[shape]) as engine:
        assert answers(engine, "rejection", temperature=0) == plain["greedy"]
        for rule in ("coupled", "exact"):
            assert answers(engine, rule) == plain[rule]
        settled(engine)


@pytest.mark.parametrize("shape", ["static", "ragged", *(pytest.param(s, marks=pytest.mark.full) for s in SHAPES)])
def test_answers_are_the_same_whatever_size_each_tree_has(plain, monkeypatch, shape) -> None:
    """Trees of 0, 1, 2, … nodes in turn, beside each other; and sizes as the policy chooses them."""
    with engine_of(depth_policy="adaptive", **SHAPES[shape]) as engine:
        assert answers(engine, "rejection", temperature=0) == plain["greedy"]
    seen = sizes_in_turn(monkeypatch)
    with engine_of(depth_policy="adaptive", **SHAPES[shape]) as engine:
        assert answers(engine, "rejection", temperature=0) == plain["greedy"]
        for rule in ("coupled", "exact"):
            assert answers(engine, rule) == plain[rule]
        settled(engine)
        assert set(seen) == set(range(engine._engine._config.tree_shape.nodes(SHAPES[shape]["depth"]) + 1))


def test_chains_trees_and_plain_rows_share_a_batch(plain) -> None:
    """Requests with prompt lookup of their own, trees of fewer levels, none at all: each says what it says alone."""
    kinds = [{}, {"source": "ngram"}, {"depth": 0}, {"depth": 1}, {"depth": 2}]
    with engine_of(**SHAPES["ragged"]) as engine:
        asked = [
            replace(request(n, "coupled", length=LENGTH, temperature=0.5 + 0.1 * (n % 6)), **kinds[n % len(kinds)])
            for n in range(COUNT)
        ]
        done = engine.complete(asked)
        settled(engine)
    assert {n: one.tokens for n, one in enumerate(done)} == plain["coupled"]
    drafted = [one.stats.drafted_tokens for one in done]
    assert [count > 0 for count in drafted[:5]] == [True, True, False, True, True]


@pytest.mark.parametrize("rule", RULES)
def test_a_tree_of_width_one_is_a_chain(rule) -> None:
    """Tokens and what was drafted and kept are the same, whatever the temperature."""
    found = []
    for tree in ({}, {"tree": [1], "outcomes": 0}):
        with engine_of(depth=4, **({"outcomes": 0} | tree)) as engine:
            done = engine.complete([request(n, rule, length=LENGTH, temperature=0.4 * (n % 4)) for n in range(COUNT)])
            found.append([(one.tokens, one.stats.drafted_tokens, one.stats.histogram) for one in done])
            settled(engine)
    assert found[0] == found[1]


def test_more_is_kept_of_a_tree() -> None:
    """With as many target rows a tree yields more tokens per round than a chain, where the draft is another model."""
    rounds = []
    dynamic = {"depth": 4, "tree": "dynamic", "tree_nodes": 6, "tree_width": 3}
    for shape in ({"depth": 6}, {"depth": 3, "tree": [2]}, dynamic):
        with engine_of(**({"outcomes": 0} | shape)) as engine:
            done = engine.complete([request(n, "rejection", length=60) for n in range(32)])
            rounds.append(sum(one.stats.rounds for one in done))
    assert max(rounds[1:]) < 0.95 * rounds[0]


@pytest.mark.parametrize("rule", ["block", "typical", "synthetic"])
def test_a_rule_without_trees_is_refused(rule) -> None:
    """As the deployment's rule at start, as a request's with what there is."""
    options = {"synthetic_acceptance": [0.5]} if rule == "synthetic" else {}
    with pytest.raises(ConfigError, match=f"rule '{rule}' cannot check drafted trees; set engine.rule to one of coup"):
        engine_of(rule=rule, **options, **SHAPES["static"])
    with engine_of(**SHAPES["static"]) as engine, pytest.raises(InvalidField, match="coupled, exact, rejection"):
        engine.complete([request(1, rule, length=4)])


def test_what_cannot_go_with_trees_is_refused_at_start() -> None:
    """Outcomes ahead, shapes that do not fit, model-free speculators, targets with other attention."""
    wrong = {
        "set outcomes to 0 or auto": {"outcomes": 1},
        "must name 1 to depth = 3 levels": {"tree": [2, 2, 2, 2]},
        "at least one child": {"tree": [2, 0]},
        "slots for a request, slots is 4": {"slots": 4},
        "below depth 3": {"tree": "dynamic", "tree_nodes": 2},
        "max_batch_tokens 65": {"tree": [8, 8], "max_batch_tokens": 65},
    }
    for told, options in wrong.items():
        with pytest.raises(ConfigError, match=told):
            engine_of(**(SHAPES["static"] | options))
    with pytest.raises(ConfigError, match="drafts chains only"):
        engine_of(draft_seed=None, **SHAPES["static"])

    class Chains(MarkovBackend):
        move = None

    assert not isinstance(Chains(1), HoldsTrees)
    with pytest.raises(ConfigError, match="attention is all on paged KV"):
        engine_of(Chains, **SHAPES["static"])
