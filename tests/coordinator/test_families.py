"""Several answers to one prompt: it is computed once, its full blocks are shared, and everything is given back."""

from __future__ import annotations

import pytest
from harness import Pipeline
from toy_workers import reference

from specserve.coordinator.sharing import shareable

PROMPT = list(range(1, 24))  # 23 tokens: 5 full blocks of 4, the newest token not counted
SHARED = 20


def family(pipeline, branches, prompt=PROMPT, max_tokens=8, name="a", **fields):
    for branch in range(branches):
        pipeline.submit(f"{name}{branch}", prompt, max_tokens, family=name, branch=branch, **fields)


def assert_answers(pipeline, branches, prompt=PROMPT, max_tokens=8, name="a"):
    for branch in range(branches):
        assert pipeline.tokens(f"{name}{branch}") == reference(prompt, max_tokens)
    assert pipeline.idle()


def fed(branches, max_tokens):
    """Positions that the target read for so many answers."""
    pipeline = Pipeline(depth=0, end=1000)
    family(pipeline, branches, max_tokens=max_tokens)
    pipeline.settle()
    assert_answers(pipeline, branches, max_tokens=max_tokens)
    return pipeline.verifier.worker.positions_seen


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_the_prompt_is_read_once(max_tokens):
    """Each further answer reads only what is past the full blocks, even if the first ends as soon as they are there."""
    decoded = max_tokens - 1
    assert fed(1, max_tokens) == len(PROMPT) + decoded
    assert fed(4, max_tokens) == len(PROMPT) + 3 * (len(PROMPT) - SHARED) + 4 * decoded


def test_a_prompt_to_be_scored_is_read_by_each():
    """Scores need every position's logits, so such a request takes nothing over."""
    pipeline = Pipeline(depth=0)
    family(pipeline, 1)
    pipeline.submit("scored", PROMPT, family="a", prompt_logprobs=0)
    plain, scored = (pipeline.engine._states[name] for name in ("a0", "scored"))
    assert (shareable(plain, 4), shareable(scored, 4)) == (SHARED, 0)


@pytest.mark.parametrize("depth", [0, 3])
def test_blocks_are_shared_by_both_models(depth):
    """While all decode, five blocks of the prompt are held once in each pool, and once more for nobody."""
    pipeline = Pipeline(depth=depth, end=1000)
    family(pipeline, 3, max_tokens=20)
    while not all(pipeline.tokens(f"a{branch}") for branch in range(3)):
        pipeline.step()
    states = [pipeline.engine._states[f"a{branch}"] for branch in range(3)]
    tables = [[state.target_table for state in states]] + [[state.draft_table for state in states]] * (depth > 0)
    for found in tables:
        assert found[0][:5] == found[1][:5] == found[2][:5]
        own = [block for table in found for block in table[5:]]
        assert len(set(own)) == len(own)
        assert not set(own) & set(found[0][:5])
    pipeline.settle()
    assert_answers(pipeline, 3, max_tokens=20)


@pytest.mark.parametrize("when", range(0, 30, 3))
@pytest.mark.parametrize("leaver", [0, 1])
def test_one_that_leaves_takes_nothing_along(when, leaver):
    """The first, or a follower, is cancelled at any moment: the others' answers and the pools are right."""
    pipeline = Pipeline(depth=3, end=1000)
    family(pipeline, 3)
    for _ in range(when):
        pipeline.step()
    pipeline.engine.cancel(f"a{leaver}")
    pipeline.settle()
    for branch in {0, 1, 2} - {leaver}:
        assert pipeline.tokens(f"a{branch}") == reference(PROMPT, 8)
    assert pipeline.idle()


def test_a_family_fits_where_copies_would_not():
    """Sixteen blocks hold one prompt and four answers; nobody is preempted, which four prompts would not allow."""
    pipeline = Pipeline(depth=0, blocks=16, draft=False, end=1000)
    family(pipeline, 4, max_tokens=6)
    pipeline.settle()
    assert_answers(pipeline, 4, max_tokens=6)
    assert all(pipeline.last(f"a{branch}").stats.queue_s == 0 for branch in range(4))
    assert max(len(deltas) for deltas in pipeline.deltas.values()) == 6
    assert "preemptions_total 0.0" in pipeline.metrics.render().replace('{model_name="toy"}', "")


def test_preempted_followers_come_back():
    """Pools too small for all of them at once: some are preempted, and all answers are right."""
    pipeline = Pipeline(depth=3, blocks=16, draft_blocks=16, end=1000)
    family(pipeline, 4, max_tokens=16)
    family(pipeline, 2, prompt=list(range(40, 55)), max_tokens=12, name="b")
    pipeline.settle()
    assert [pipeline.tokens(f"a{branch}") for branch in range(4)] == [reference(PROMPT, 16)] * 4
    assert [pipeline.tokens(f"b{branch}") for branch in range(2)] == [reference(list(range(40, 55)), 12)] * 2
    assert pipeline.idle()


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("when", [3, 9, 15, 21])
def test_lost_workers_are_refilled_once(which, when):
    """After a restart the prompt is shared anew."""
    pipeline = Pipeline(depth=3, end=1000)
    family(pipeline, 3, max_tokens=16)
    for _ in range(when):
        pipeline.step()
    pipeline.lose(which)
    pipeline.restart(which)
    pipeline.settle()
    assert_answers(pipeline, 3, max_tokens=16)


def test_another_prompt_under_the_same_name_shares_nothing():
    """A wrong family name costs nothing but the sharing."""
    pipeline = Pipeline(depth=0, end=1000)
    other = [token + 1 for token in PROMPT]
    pipeline.submit("a", PROMPT, 5, family="x")
    pipeline.submit("b", other, 5, family="x")
    pipeline.settle()
    assert (pipeline.tokens("a"), pipeline.tokens("b")) == (reference(PROMPT, 5), reference(other, 5))


def test_a_short_prompt_has_nothing_to_share():
    """A prompt without a full block before its newest token: nobody waits for anybody."""
    pipeline = Pipeline(depth=0, end=1000)
    family(pipeline, 3, prompt=[1, 2, 3, 4], max_tokens=2)
    pipeline.settle()
    assert_answers(pipeline, 3, prompt=[1, 2, 3, 4], max_tokens=2)
