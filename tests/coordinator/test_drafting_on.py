"""The draft works on after a verdict: what comes too late to be offered tells what may follow the whole chain."""

import numpy as np
import pytest
from harness import Pipeline
from test_ahead_machine import LateChannel
from toy_workers import ToyDraft, reference

from specserve.transport.messages import Failed, PlanAhead

PROMPT = [1, 2, 3]


def drafting(depth=3, **fields):
    """A pipeline in the middle of an answer, whose draft is always right; a round and a plan are on their way."""
    fields = {"make_channel": LateChannel, "outcomes": 30, "make_draft": lambda: ToyDraft(miss=10**9)} | fields
    pipeline = Pipeline(depth=depth, round_s=0.1, **fields)
    pipeline.submit("a", PROMPT, 40)
    pipeline.engine.advance()
    while len(pipeline.tokens("a")) < 6 or not plans(pipeline):
        pipeline.step()
        pipeline.engine.advance()
    return pipeline


def plans(pipeline):
    """The plans that wait at the worker."""
    return [message for message in pipeline.draft.held if isinstance(message, PlanAhead)]


def verdict_after(pipeline, pushes):
    """The worker computes its plan, of which so many pushes come before the verdict; the others stay on their way."""
    while pipeline.draft.held:
        pipeline.draft.work()
    for _ in range(pushes):
        pipeline.draft.let_through(pipeline.engine)
    pipeline.clock.now += pipeline.round_s
    pipeline.verifier.deliver(pipeline.engine)
    pipeline.engine.advance()
    pipeline.engine.flush()
    pipeline.engine.check()


def test_the_next_plan_need_not_wait_for_the_end_of_the_one_before():
    """A verdict comes after two of a plan's steps: what they brought is offered, and the next plan leaves at once.

    It names the slot of the token behind the chain, and so its branches there begin with its first step.
    """
    pipeline = drafting()
    (first,) = plans(pipeline)
    verdict_after(pipeline, 2)

    (plan,) = plans(pipeline)
    assert plan.plan == first.plan + 1
    assert pipeline.draft.replies, "pushes of the first plan are still on their way"
    (offered,) = (message.chain_lengths.tolist() for message in pipeline.verifier.held)
    assert offered == plan.chain_lengths.tolist()
    assert offered[0] > 0
    assert plan.next_plans.tolist() == [first.plan]
    assert plan.next_slots[0] in first.slots
    behind = plan.parents == offered[0]
    assert behind.any()
    assert not plan.firsts[behind].any()
    pipeline.settle()
    assert pipeline.tokens("a") == reference(PROMPT, 40)
    assert pipeline.idle()
    assert pipeline.draft.worker.unfed == 0


def test_late_pushes_are_taken_in_and_change_nothing():
    """They are no strays, their time counts, and they give no token: the next chain is that of the next plan."""
    pipeline = drafting()
    verdict_after(pipeline, 2)
    chain = pipeline.engine._states["a"].chain.tokens
    before = pipeline.metrics.render().count('reason="stale_push"')
    while pipeline.draft.replies:
        pipeline.draft.let_through(pipeline.engine)
        pipeline.engine.check()
    assert pipeline.engine._states["a"].chain.tokens == chain
    assert pipeline.metrics.render().count('reason="stale_push"') == before
    pipeline.settle()
    assert pipeline.tokens("a") == reference(PROMPT, 40)


def test_a_worker_is_at_most_two_plans_behind():
    """With two plans at the worker, of which one is over in the books, a third one waits until the first has ended."""
    pipeline = drafting()
    verdict_after(pipeline, 2)
    late = list(pipeline.draft.replies)
    pipeline.draft.replies.clear()
    pipeline.verifier.deliver(pipeline.engine)
    pipeline.engine.advance()
    pipeline.engine.flush()
    assert len(plans(pipeline)) == 1
    pipeline.draft.replies.extend(late)
    pipeline.settle()
    assert pipeline.tokens("a") == reference(PROMPT, 40)


@pytest.mark.parametrize("which", [0, 1])
def test_a_plan_that_fails_behind_its_verdict_takes_the_next_one_along(which):
    """Nobody knows then what the draft's caches hold: neither plan's branches are adopted, and the text is the same."""
    pipeline = drafting()
    verdict_after(pipeline, 2)
    number = plans(pipeline)[0].plan - 1 + which
    pipeline.draft.replies.clear()
    pipeline.draft.replies.append(Failed(number, np.empty(0, dtype=np.int64), "out of memory"))
    pipeline.draft.let_through(pipeline.engine)
    pipeline.engine.check()
    assert not pipeline.engine._states["a"].chain.tokens
    pipeline.settle()
    pipeline.clock.now += 30
    pipeline.settle()
    assert pipeline.tokens("a") == reference(PROMPT, 40)
    assert pipeline.idle()


def test_a_lost_end_of_a_plan_is_seen_by_the_next_plans_pushes():
    """The worker does what it is told in order, so it is not given up for a push that got lost."""
    pipeline = drafting()
    verdict_after(pipeline, 2)
    pipeline.draft.replies.clear()
    pipeline.settle()
    pipeline.clock.now += 30
    pipeline.settle()
    assert pipeline.engine.away == ()
    assert pipeline.tokens("a") == reference(PROMPT, 40)


def test_a_perfect_draft_yields_depth_plus_one_tokens_a_round_without_feeding_its_chain_again():
    """Where every plan is pushed whole, one token more than is offered was drafted, and tells the guess behind."""
    pipeline = drafting(depth=2)
    seen = []
    for _ in range(6):
        (plan,) = plans(pipeline)
        seen.append((plan.chain_lengths.tolist(), plan.next_slots.tolist()[0] >= 0))
        verdict_after(pipeline, 99)
    assert seen[2:] == [([2], True)] * 4
