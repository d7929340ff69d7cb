"""The engine with its prefix caches: what is cached is not fed, in both models, and no answer changes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from harness import Pipeline, info
from toy_workers import ToyDraft, ToyVerifier, reference

from specserve.coordinator.prefix_cache import PrefixCache, pool_of
from specserve.coordinator.sharing import reusable
from specserve.transport.messages import Failed, Plan, PlanAhead, Verify

PROMPT = list(range(1, 24))  # 23 tokens: 5 full blocks of 4, the newest token not counted
CACHED = 20


def pipeline_of(**settings):
    return Pipeline(**{"depth": 3, "end": 1000, "max_requests": 4} | settings)


def ask(pipeline, name, prompt, count=6, **fields):
    """One request from begin to end; positions that the target read for it."""
    before = pipeline.verifier.worker.positions_seen
    pipeline.submit(name, prompt, count, **fields)
    pipeline.settle()
    assert pipeline.tokens(name) == reference(prompt, count)
    assert pipeline.idle()
    return pipeline.verifier.worker.positions_seen - before


def counted(pipeline, name, role):
    """A counter of the prefix cache, as it is exported."""
    pipeline.engine._show_levels()
    line = f'specserve_prefix_cache_{name}_total{{model_name="toy",role="{role}"}} '
    return next(int(float(each[len(line) :])) for each in pipeline.metrics.render().splitlines() if line in each)


def test_a_second_turn_is_fed_from_where_the_first_one_ended():
    """Prompt and answer are both there: only what follows the last full block of them is read."""
    pipeline = pipeline_of(depth=0)
    assert ask(pipeline, "first", PROMPT, 12) == 23 + 11
    second = [*PROMPT, *reference(PROMPT, 12), 50, 51]  # 23 + 12 + 2 tokens, of which the target read 34
    assert ask(pipeline, "second", second, 5) == 37 - 32 + 4
    assert pipeline.last("first").stats.cached_tokens == 0
    assert pipeline.last("second").stats.cached_tokens == 32


@pytest.mark.parametrize("outcomes", [0, 3])
def test_both_models_take_over_what_they_have(outcomes):
    """Serial and ahead of the verdict: draft and target each find the prompt's full blocks, and no more."""
    pipeline = pipeline_of(outcomes=outcomes)
    ask(pipeline, "cold", PROMPT)
    assert (counted(pipeline, "hits", "target"), counted(pipeline, "hits", "draft")) == (0, 0)
    ask(pipeline, "warm", PROMPT)
    assert (counted(pipeline, "hits", "target"), counted(pipeline, "hits", "draft")) == (CACHED, CACHED)


@pytest.mark.parametrize("seed", range(6))
def test_the_books_are_exact(seed):
    """Tokens looked up less tokens found are tokens read; requests report what the counters say."""
    chance = random.Random(seed)
    pipeline = pipeline_of(depth=0, draft=False)
    texts = [[chance.randrange(3) for _ in range(40)] for _ in range(3)]
    decoded = asked = 0
    for number in range(25):
        prompt = texts[chance.randrange(3)][: chance.randint(2, 40)]  # a single token is fed without looking
        count = chance.randint(1, 5)
        pipeline.submit(f"r{number}", prompt, count)
        decoded, asked = decoded + count - 1, asked + len(prompt)
        if chance.random() < 0.6:
            pipeline.settle()
    pipeline.settle()
    queries, hits = (counted(pipeline, name, "target") for name in ("queries", "hits"))
    assert queries == asked
    assert pipeline.verifier.worker.positions_seen == queries - hits + decoded
    assert hits == sum(pipeline.last(f"r{number}").stats.cached_tokens for number in range(25)) > 0


def test_answers_to_one_prompt_begin_with_what_is_cached():
    """n = 3 behind a request with the same prompt: its blocks are read by nobody again."""
    pipeline = pipeline_of(depth=0)
    ask(pipeline, "before", PROMPT)
    seen = pipeline.verifier.worker.positions_seen
    for branch in range(3):
        pipeline.submit(f"a{branch}", PROMPT, 4, family="a", branch=branch)
    pipeline.settle()
    assert pipeline.verifier.worker.positions_seen - seen == 3 * (23 - CACHED + 3)


def test_salts_and_the_switch():
    """Another salt finds nothing, and no cache at all is kept where that is configured."""
    pipeline = pipeline_of(depth=0)
    assert [ask(pipeline, salt, PROMPT, 1, cache_salt=salt) for salt in ("a", "b", "a ")] == [23, 23, 23]
    pipeline.submit("again", PROMPT, 1, cache_salt="b")
    pipeline.settle()
    assert pipeline.last("again").stats.cached_tokens == CACHED
    without = pipeline_of(depth=0, prefix_cache=False)
    assert [ask(without, name, PROMPT, 1) for name in "ab"] == [23, 23]
    assert without.engine.levels().target_blocks_cached == 0


def test_a_worker_that_keeps_more_than_blocks_has_no_cache():
    """Nobody could go on from the blocks of a model with recurrent state."""
    config = pipeline_of().config.engine
    assert isinstance(pool_of(config, info("target")), PrefixCache)
    assert not isinstance(pool_of(config, replace(info("target"), positional=False)), PrefixCache)


def test_a_prompt_to_be_scored_is_read_whole():
    """Scores need every position's logits."""
    pipeline = pipeline_of()
    pipeline.submit("scored", PROMPT, prompt_logprobs=0)
    pipeline.submit("plain", PROMPT, logprobs=0)
    assert [reusable(pipeline.engine._states[name]) for name in ("scored", "plain")] == [False, True]


@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_lost_worker_takes_its_cache_along(which):
    """Its next life has nothing: the prompt is fed to it in full, and the other worker still has its own."""
    pipeline = pipeline_of()
    ask(pipeline, "before", PROMPT)
    pipeline.lose(which)
    pipeline.restart(which)
    ask(pipeline, "after", PROMPT)
    hits = {role: counted(pipeline, "hits", role) for role in ("target", "draft")}
    assert hits == {"target": CACHED, "draft": CACHED, which: 0}


@pytest.mark.parametrize("blocks", [20, 100])
def test_a_verifier_may_come_back_with_another_number_of_blocks(blocks):
    """How much memory is free may have changed meanwhile: requests go on within what there is now."""
    pipeline = pipeline_of(blocks=40)
    ask(pipeline, "before", PROMPT)
    for name in "abc":
        pipeline.submit(name, [ord(name) % 90, *PROMPT], 20)
    for _ in range(9):
        pipeline.step()
    pipeline.lose("target")
    pipeline.restart("target", blocks)
    pipeline.settle()
    assert all(pipeline.tokens(name) == reference([ord(name) % 90, *PROMPT], 20) for name in "abc")
    assert pipeline.engine.levels().target_blocks_capacity == blocks
    assert pipeline.idle()


class Spoilt(ToyVerifier):
    """Fails every row that is due while it is told to."""

    failing = False

    def handle(self, message):
        if self.failing and isinstance(message, Verify):
            return [Failed(message.round, message.rows, "not finite")]
        return super().handle(message)


def test_what_an_ill_request_left_is_not_handed_on():
    """A row at fault may owe its fault to KV that others would go on from: the cache is emptied."""
    pipeline = pipeline_of(depth=0, make_verifier=Spoilt)
    ask(pipeline, "well", PROMPT)
    pipeline.verifier.worker.failing = True
    pipeline.submit("ill", PROMPT, 3)
    pipeline.settle()
    assert pipeline.last("ill").finish == "error"
    pipeline.verifier.worker.failing = False
    assert ask(pipeline, "after", PROMPT, 1) == 23


class SpoiltDraft(ToyDraft):
    """Fails every plan while it is told to."""

    failing = False

    def handle(self, message):
        if self.failing and isinstance(message, Plan | PlanAhead):
            return [Failed(message.plan, np.empty(0, np.int64), "raised")]
        return super().handle(message)


@pytest.mark.parametrize("outcomes", [0, 3])
def test_a_plan_that_raised_empties_the_drafts_cache(outcomes):
    """Nothing says what led to that: whoever begins next is fed from nothing."""
    pipeline = pipeline_of(make_draft=SpoiltDraft, outcomes=outcomes)
    ask(pipeline, "before", PROMPT)
    pipeline.draft.worker.failing = True
    ask(pipeline, "during", [*PROMPT[:12], 60, 61])
    assert counted(pipeline, "hits", "draft") == 12
    pipeline.draft.worker.failing = False
    ask(pipeline, "after", PROMPT)
    assert counted(pipeline, "hits", "draft") == 12
    assert counted(pipeline, "hits", "target") == 12 + CACHED


def test_who_was_preempted_goes_on_from_what_is_left():
    """A request that gave its place up reads again only what was evicted meanwhile."""
    pipeline = pipeline_of(depth=0, draft=False, blocks=20)
    prompts = [[10 * which + at for at in range(9)] for which in range(4)]
    for which, prompt in enumerate(prompts):
        pipeline.submit(f"r{which}", prompt, 20)
    pipeline.settle()
    assert all(pipeline.tokens(f"r{which}") == reference(prompt, 20) for which, prompt in enumerate(prompts))
    assert "preemptions_total 0.0" not in pipeline.metrics.render().replace('{model_name="toy"}', "")
    assert counted(pipeline, "hits", "target") > 0
    assert all(pipeline.last(f"r{which}").stats.cached_tokens == 0 for which in range(4))  # the prompts were new


def said(seed, **settings):
    """Answers under a random load: shared beginnings, cancels, small pools, workers that are lost."""
    chance = random.Random(seed)
    settings = {"blocks": 18, "draft_blocks": 16, "slots": 8, "max_batch_tokens": 24, "queue_limit": 99} | settings
    pipeline = pipeline_of(**settings)
    texts = [[chance.randrange(90) for _ in range(40)] for _ in range(3)]
    asked = {}
    for number in range(30):
        name = f"r{number}"
        asked[name] = texts[chance.randrange(3)][: chance.randint(1, 30)], chance.randint(1, 16)
        pipeline.submit(name, *asked[name])
        for _ in range(chance.randrange(12)):
            pipeline.step()
        event = chance.random()
        if event < 0.1:
            pipeline.engine.cancel(f"r{chance.randrange(number + 1)}")
        elif event < 0.2:
            which = chance.choice(["target", "draft"])
            pipeline.lose(which)
            pipeline.restart(which)
    pipeline.settle()
    assert pipeline.idle()
    for name, (prompt, count) in asked.items():
        got = pipeline.tokens(name)
        assert got == reference(prompt, count)[: len(got)]
        assert len(got) == count or pipeline.last(name).finish == "abort"
    hits = [counted(pipeline, "hits", role) for role in ("target", "draft")]
    return {name: pipeline.tokens(name) for name in asked if pipeline.last(name).finish != "abort"}, hits


@pytest.mark.parametrize("outcomes", [0, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_cache_changes_no_answer(seed, outcomes):
    """Greedy answers with and without it are the same, token by token, while everything goes wrong."""
    kept, hits = said(seed, outcomes=outcomes)
    plain, none = said(seed, outcomes=outcomes, prefix_cache=False)
    assert all(kept[name] == plain[name] for name in kept.keys() & plain.keys())
    assert len(kept) > 15
    assert min(hits) > 0
    assert none == [0, 0]
