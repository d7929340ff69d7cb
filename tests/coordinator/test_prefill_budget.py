"""Prompts beside running answers: a round never carries more of them than the budget, and nobody starves."""

from __future__ import annotations

import pytest
from harness import Pipeline
from toy_workers import ToyVerifier, reference

from specserve.transport.messages import Verify


class Counting(ToyVerifier):
    """Notes (prompt positions, decode rows) of each round; a first token is due like any other."""

    def __init__(self):
        super().__init__()
        self.rounds = []

    def handle(self, message):
        if isinstance(message, Verify):
            fed = int(message.feed_lengths[message.feed_lengths > 1].sum())
            self.rounds.append((fed, int((message.feed_lengths == 1).sum())))
        return super().handle(message)


def burst(**settings):
    """One answer runs when seven prompts of 40 tokens come at once."""
    pipeline = Pipeline(
        make_verifier=Counting,
        blocks=200,
        draft_blocks=200,
        context=300,
        end=1000,
        prefill_chunk=16,
        prefix_cache=False,
        **settings,
    )
    pipeline.submit("running", [90, 91], 250)
    while not pipeline.tokens("running"):
        pipeline.step()
    pipeline.verifier.worker.rounds.clear()
    prompts = {f"r{at}": [(10 * at + each) % 97 for each in range(40)] for at in range(7)}
    for name, prompt in prompts.items():
        pipeline.submit(name, prompt, 4)
    pipeline.settle()
    assert all(pipeline.tokens(name) == reference(prompt, 4) for name, prompt in prompts.items())
    assert pipeline.tokens("running") == reference([90, 91], 250)
    return pipeline.verifier.worker.rounds


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("budget", [4, 16, 24])
def test_no_round_carries_more_prompt_than_the_budget(depth, budget):
    """Every round has the running answer in it, and at most so many prompt tokens; all of them get there."""
    rounds = burst(depth=depth, prefill_budget=budget)
    assert max(fed for fed, _ in rounds) <= budget
    assert all(decoding for fed, decoding in rounds if fed)


def test_without_such_a_budget_rounds_are_long():
    """What the budget is for: as large as the batch, it lets four prompts into one round."""
    assert max(fed for fed, _ in burst(depth=0, prefill_budget=64)) > 48


def test_prompts_have_the_whole_batch_while_nobody_waits_for_them():
    """No answer runs, so there is nothing to hold up."""
    pipeline = Pipeline(make_verifier=Counting, depth=0, end=1000, prefill_chunk=40, prefill_budget=4)
    pipeline.submit("r", list(range(40)), 1)
    pipeline.settle()
    assert pipeline.verifier.worker.rounds[0] == (40, 0)
