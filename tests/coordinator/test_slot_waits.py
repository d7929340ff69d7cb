"""Where slots lack, requests go without drafts, and how long they do is counted."""

from __future__ import annotations

import pytest
from harness import Pipeline
from toy_workers import reference

NAME = "specserve_slot_wait_seconds"


def waits(pipeline: Pipeline) -> tuple[float, float]:
    """Ended waits, and their seconds together."""
    lines = pipeline.metrics.render().splitlines()
    count, seconds = (
        float(line.rsplit(" ", 1)[1])
        for part in ("count", "sum")
        for line in lines
        if line.startswith(f"{NAME}_{part}{{")
    )
    return count, seconds


@pytest.mark.parametrize("outcomes", [0, 1])
def test_a_request_waits_for_the_slots_that_another_has(outcomes):
    """Four slots for two chains of four: the second drafts when the first has ended, so many rounds later."""
    pipeline = Pipeline(depth=4, slots=4, outcomes=outcomes, end=1000, round_s=1.0, draft_wait_s=100, hang_after_s=100)
    for name, length in (("a", 12), ("b", 40)):
        pipeline.submit(name, [1, 2, 3], max_tokens=length)
    pipeline.settle()
    assert pipeline.tokens("b") == reference([1, 2, 3], 40)
    assert pipeline.last("b").stats.kept_tokens > 0
    count, seconds = waits(pipeline)
    assert count >= 1
    assert 1 <= seconds <= pipeline.clock.now
    assert pipeline.idle()


@pytest.mark.parametrize("outcomes", [0, 1])
def test_nobody_waits_where_there_are_slots_for_all(outcomes):
    """Nor does a request that ends before it got any."""
    pipeline = Pipeline(depth=4, slots=64, outcomes=outcomes, end=1000, round_s=1.0)
    for name in ("a", "b"):
        pipeline.submit(name, [1, 2, 3], max_tokens=20)
    pipeline.settle()
    assert waits(pipeline) == (0, 0)


def test_who_leaves_while_it_waits_is_forgotten():
    """A client that goes away without a slot ends no wait, and leaves nothing behind."""
    pipeline = Pipeline(depth=4, slots=4, end=1000, round_s=1.0)
    for name in ("a", "b"):
        pipeline.submit(name, [1, 2, 3], max_tokens=40)
    link = pipeline.engine._drafts.link
    while not link.slot_waits._since_s:
        assert pipeline.step()
    (row,) = link.slot_waits._since_s
    (waiting,) = [name for name, state in pipeline.engine._states.items() if state.row == row]
    pipeline.engine.cancel(waiting)
    pipeline.settle()
    assert waits(pipeline) == (0, 0)
    assert not link.slot_waits._since_s


def test_cancelled_requests_are_counted_where_they_were():
    """One that waits for its place, one whose prompt is read, one that has said something."""
    pipeline = Pipeline(depth=0, end=1000, max_requests=2)
    for name, length in (("decode", 3), ("prefill", 30), ("queued", 3)):
        pipeline.submit(name, list(range(length)), max_tokens=20)
    while not pipeline.tokens("decode"):
        assert pipeline.step()
    for name in ("queued", "prefill", "decode", "nobody"):
        pipeline.engine.cancel(name)
    pipeline.settle()
    text = pipeline.metrics.render()
    for stage in ("queued", "prefill", "decode"):
        assert f'specserve_requests_cancelled_total{{model_name="toy",stage="{stage}"}} 1.0' in text
    assert pipeline.idle()
