"""A worker that does not answer in time counts as lost, though nobody said so; the others go on."""

from __future__ import annotations

import math
import re

import pytest
from harness import Pipeline
from toy_workers import reference

HANG_S = 5.0


def pipeline(**settings):
    return Pipeline(hang_after_s=HANG_S, draft_wait_s=1.0, end=1000, **settings)


def run_until_held(pipeline, which):
    """Up to the moment at which the worker was sent a batch and has not seen it."""
    channel = pipeline.verifier if which == "target" else pipeline.draft
    other = pipeline.draft if which == "target" else pipeline.verifier
    for _ in range(20):
        pipeline.engine.advance()
        while other.held:
            other.deliver(pipeline.engine)
        if pipeline.engine.activity.sent_at(which) is not None:
            return channel
    raise AssertionError("nothing was sent")


@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_worker_that_does_not_answer_is_given_up(which):
    """Not before the bound, which is when the engine wants to be woken; then `away` names it, and a new one helps."""
    here = pipeline()
    here.submit("a", [1, 2, 3], max_tokens=12)
    run_until_held(here, which)
    assert here.engine.away == ()
    assert here.engine.deadline_s <= here.clock.now + HANG_S

    here.clock.now += HANG_S - 0.01
    here.engine.advance()
    assert here.engine.away == ()

    here.clock.now += 0.01
    here.engine.advance()
    here.engine.check()
    assert here.engine.away == (which,)

    (here.verifier if which == "target" else here.draft).held.clear()
    here.restart(which)
    assert here.engine.away == ()
    here.settle()
    assert here.tokens("a") == reference([1, 2, 3], 12)
    assert here.idle()
    assert restarts(here) == {(which, "hung"): 1}


@pytest.mark.parametrize("which", ["target", "draft"])
def test_restarts_are_counted_by_what_had_been_wrong(which):
    """Gone; a channel that refuses messages; a successor that comes unasked; nothing is counted twice."""
    here = pipeline()
    here.submit("a", [1, 2, 3], max_tokens=30)
    here.lose(which)
    here.restart(which)
    (here.verifier if which == "target" else here.draft).close()
    while which not in here.engine.away:
        here.step()
    here.restart(which)
    here.restart(which)
    here.settle()
    assert here.tokens("a") == reference([1, 2, 3], 30)
    assert restarts(here) == {(which, why): 1 for why in ("lost", "channel", "replaced")}


def restarts(here):
    """Counts above 0 by role and reason."""
    lines = [line for line in here.metrics.render().splitlines() if line.startswith("specserve_worker_restarts_total{")]
    found = {tuple(re.search(rf'{label}="(\w+)"', line)[1] for label in ("role", "reason")): line for line in lines}
    assert len(found) == 10
    return {key: count for key, line in found.items() if (count := float(line.rsplit(" ", 1)[1]))}


def test_without_the_draft_worker_rounds_go_on_at_once():
    """What waits for a draft worker that hangs waits no longer than draft_wait_s, and the answer is right."""
    here = pipeline()
    here.submit("a", [1, 2, 3], max_tokens=12)
    run_until_held(here, "draft").closed = True
    here.clock.now += 1.0
    here.settle()
    assert here.tokens("a") == reference([1, 2, 3], 12)
    assert here.engine.away == ()  # nothing is judged before its time
    here.clock.now += HANG_S
    here.engine.advance()
    assert here.engine.away == ("draft",)


def test_idle_workers_are_not_judged():
    """Hours without work are no hang, and need no waking."""
    here = pipeline()
    here.submit("a", [1, 2, 3], max_tokens=3)
    here.settle()
    assert here.engine.deadline_s is None
    here.clock.now += 1000 * HANG_S
    here.engine.advance()
    assert here.engine.away == ()
    assert here.engine._overdue_s("target") == math.inf


def test_a_deployment_without_draft_worker_lacks_none():
    """Only what was there can be away."""
    assert pipeline(draft=False).engine.away == ()
