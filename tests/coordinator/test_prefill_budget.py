"""Prompts beside running answers: a round never carries more of them than the budget, and nobody starves."""

from __future__ import annotations

import pytest
from harness import Pipeline
from toy_workers import ToyVerifier, reference

from specserve.transport import Arrived
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


def test_a_prompt_goes_on_in_the_round_whose_last_answer_had_to_give_way():
    """Where drafts take nothing, an answer that finds no block gives its own: the round is then the older prompt's,
    whose rest nobody else would ask for. The engine is called when something came, and at no other time."""
    pipeline = Pipeline(
        blocks=12, draft=False, end=10**6, context=48, prefill_chunk=8, prefill_budget=1, prefix_cache=False, depth=0
    )
    older, younger = list(range(40)), [0]
    pipeline.submit("older", older, 4)
    pipeline.submit("younger", younger, 40)
    pipeline.engine.advance()
    came = True
    while came:
        answers = [each for message in _taken(pipeline) for each in pipeline.verifier.worker.handle(message)]
        for answer in answers:
            pipeline.engine.receive(Arrived("target", 0, answer))
        came = bool(answers)
        if came:
            pipeline.engine.advance()
    pipeline.engine.flush()
    assert pipeline.idle()
    assert pipeline.tokens("older") == reference(older, 4)
    assert pipeline.tokens("younger") == reference(younger, 40)


def _taken(pipeline):
    held = list(pipeline.verifier.held)
    pipeline.verifier.held.clear()
    return held
