"""Options, scores and grammars along the paths of drafted trees: the answers are those without speculation."""

from __future__ import annotations

import json

import jsonschema
import pytest
from test_options import OPTIONS, assert_same, engine, folders, requests
from test_structured import ask, schemas

from specserve.types import Structured

assert folders  # the fixture: a target, and a draft that resembles it

SHAPES = [{"tree": [3, 2]}, {"tree": "dynamic", "tree_nodes": 9, "tree_width": 3}]


@pytest.fixture(scope="module", params=SHAPES, ids=["static", "dynamic"])
def running(request, folders):
    with engine(folders, queue_limit=200, max_batch_tokens=128, **request.param) as made:
        yield made


def nothing_held(engine) -> bool:
    levels = engine.levels()
    return levels.slots_held + levels.target_blocks_held + levels.draft_blocks_held == 0


def test_no_option_is_changed_by_a_tree(running) -> None:
    """All options at once, greedy and seeded under `coupled`, alone and as three answers to one prompt."""
    seeded = {"temperature": 0.8, "rule": "coupled", "seed": 3}
    for options in ({}, seeded):
        plain = [running.complete(requests(name, 0, **options))[0] for name in OPTIONS]
        together = running.complete([each for name in OPTIONS for each in requests(name, 4, **options)])
        for found, expected in zip(together, plain, strict=True):
            assert_same(found, expected)
        assert sum(one.stats.kept_tokens for one in together) > len(OPTIONS)
    for found in running.complete(requests("everything", 4, branches=3)):
        assert_same(found, running.complete(requests("everything", 0))[0])
    assert nothing_held(running)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_held_to_their_grammar(running, temperature) -> None:
    """Each node is masked by its own path: whole, valid JSON, and at temperature 0 the text without speculation."""
    asked = schemas(8)
    wanted = [Structured("json_schema", json.dumps(schema)) for schema in asked]
    answers = {depth: ask(running, wanted, depth, temperature, max_tokens=300) for depth in (0, 4)}
    for schema, answer in zip(asked, answers[4], strict=True):
        assert answer.finish_reason == "stop", (schema, answer.text)
        jsonschema.validate(json.loads(answer.text), schema)
    if temperature == 0:
        assert [one.text for one in answers[0]] == [one.text for one in answers[4]]
    assert sum(one.stats.kept_tokens for one in answers[4]) > len(asked)
    assert nothing_held(running)
