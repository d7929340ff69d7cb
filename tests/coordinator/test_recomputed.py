"""What is counted as computed again is what the target was really fed a second time, and nothing else."""

from __future__ import annotations

import pytest
from harness import Pipeline
from toy_workers import reference

from specserve.transport.messages import Verify
from specserve.types import Request, RequestId, RequestStats, Sampling

PROMPTS = {f"r{number}": [(17 * number + at) % 90 for at in range(6 + 5 * number)] for number in range(3)}


class Fed:
    """Looks at every batch that a verifier computes: positions of a row that it, or one before it, was fed before."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.again = 0
        self._seen: set[tuple[int, int]] = set()
        self._pipeline = pipeline
        self.watch()

    def watch(self) -> None:
        """Also the verifier that there is now."""
        worker = self._pipeline.verifier.worker
        handle = worker.handle

        def watched(message):
            if isinstance(message, Verify):
                self._note(message)
            return handle(message)

        worker.handle = watched

    def _note(self, message: Verify) -> None:
        columns = (message.rows, message.starts, message.feed_lengths)
        for row, start, length in zip(*(column.tolist() for column in columns), strict=True):
            positions = {(row, at) for at in range(start, start + length)}
            self.again += len(positions & self._seen)
            self._seen |= positions


def counted(pipeline: Pipeline) -> float:
    (line,) = [
        line for line in pipeline.metrics.render().splitlines() if line.startswith("specserve_recomputed_tokens_total{")
    ]
    return float(line.rsplit(" ", 1)[1])


def running(steps: int, **fields) -> Pipeline:
    """Three requests, after so many steps."""
    pipeline = Pipeline(depth=0, end=1000, **fields)
    for name, prompt in PROMPTS.items():
        pipeline.submit(name, prompt, max_tokens=20)
    for _ in range(steps):
        pipeline.step()
    return pipeline


def ended(pipeline: Pipeline) -> None:
    pipeline.settle()
    assert all(pipeline.tokens(name) == reference(prompt, 20) for name, prompt in PROMPTS.items())
    assert pipeline.idle()


@pytest.mark.parametrize("steps", [4, 5, 9, 14])
@pytest.mark.parametrize("later", [None, 2, 6])
def test_a_lost_verifier_makes_the_target_compute_again_what_it_had(steps, later):
    """Whenever it is lost, and lost once more while it is refilled: each position as often as it was fed again."""
    pipeline = running(0)
    fed = Fed(pipeline)
    for after in (steps,) if later is None else (steps, later):
        for _ in range(after):
            pipeline.step()
        pipeline.engine.advance()
        pipeline.lose("target")
        pipeline.restart("target")
        fed.watch()
    ended(pipeline)
    assert counted(pipeline) == fed.again > 0


def test_what_is_only_partly_lost_counts_for_the_rest():
    """The verifier cannot go on from behind position 3: what it still covers is not computed again."""
    pipeline = running(9)
    state = pipeline.engine._states["r1"]
    pipeline.verifier.worker.lost = {state.row: 3}
    had = state.target_cached
    ended(pipeline)
    assert counted(pipeline) == had - 3


def test_preempted_requests_count_unless_their_blocks_are_found_again():
    """With KV for a few only, as many positions as were fed twice: those that the prefix cache kept were not."""
    counts = {}
    for cached in (False, True):
        pipeline = running(0, blocks=16, prefix_cache=cached)
        fed = Fed(pipeline)
        ended(pipeline)
        assert counted(pipeline) == fed.again
        counts[cached] = fed.again
    assert counts[False] > 0
    assert counts[True] <= counts[False]


@pytest.mark.parametrize("depth", [0, 4])
def test_nothing_counts_while_nothing_is_lost(depth):
    """Refused drafts are written over, prompts that are found in the cache are not fed at all: neither is counted."""
    pipeline = Pipeline(depth=depth, end=1000)
    for name in ("a", "b"):
        pipeline.submit(name, list(range(24)), max_tokens=20)
        pipeline.settle()
    assert "specserve_prefix_cache_hits_total" in pipeline.metrics.render()
    assert pipeline.last("b").stats.cached_tokens > 0
    assert counted(pipeline) == 0


@pytest.mark.parametrize("answered", [0, 7])
def test_behind_a_new_coordinator_what_was_answered_from_counts(answered):
    """Its prompt and all but the newest token, once tokens had come; before, nobody knows that any was computed."""
    prompt, whole = [1, 2, 3, 4, 5], reference([1, 2, 3, 4, 5], 20)
    request = Request(
        RequestId("a"), tuple(prompt), 20, Sampling(temperature=0), answer=tuple(whole[:answered]), ignore_eos=True
    )
    before = RequestStats(5, answered, answered, 0, 0, (), 0.0, 0.1, 0.5)
    pipeline = Pipeline(depth=0, end=1000)
    pipeline.engine.submit(request, "me", before)
    pipeline.settle()
    assert pipeline.tokens("a") == whole[answered:]
    assert counted(pipeline) == (len(prompt) + answered - 1 if answered else 0)


def test_behind_a_new_coordinator_cached_tokens_of_the_prompt_are_what_they_were():
    """What is found of prompt and answer when the request goes on is more than its prompt may have."""
    prompt, whole = [1, 2, 3, 4, 5], reference([1, 2, 3, 4, 5], 30)
    pipeline = Pipeline(depth=0, end=1000)
    pipeline.submit("first", prompt, max_tokens=20)
    pipeline.settle()
    request = Request(
        RequestId("a"), tuple(prompt), 30, Sampling(temperature=0), answer=tuple(whole[:17]), ignore_eos=True
    )
    before = RequestStats(5, 17, 17, 0, 0, (), 0.0, 0.1, 0.5, cached_tokens=4)
    pipeline.engine.submit(request, "me", before)
    pipeline.settle()
    assert pipeline.tokens("a") == whole[17:]
    assert pipeline.last("a").stats.cached_tokens == 4
