"""When to draft ahead and when in turns: simulated rounds of known worth, and an engine whose draft is always late."""

from __future__ import annotations

import random

import pytest
from harness import Pipeline
from test_ahead_machine import LateChannel

from specserve.coordinator.turns_switch import TurnsSwitch


class Rounds:
    """Rounds of one request: so many tokens per second in each way, with the noise that acceptance has."""

    def __init__(self, ahead: float, in_turns: float, promised: float | None, seed: int = 0) -> None:
        self.switch = TurnsSwitch()
        self._worth = {False: ahead, True: in_turns}
        self._promised = promised
        self._random = random.Random(seed)

    def share_in_turns(self, rounds: int, rows: int = 1) -> float:
        """Of so many more rounds."""
        taken = 0
        for _ in range(rounds):
            way = self.switch.in_turns
            tokens = sum(self._random.randint(1, 5) for _ in range(rows))
            promised = None if way else self._promised
            self.switch.observe(tokens, rows, 3.0 / self._worth[way], promised)
            taken += way
        return taken / rounds


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rows", [1, 32])
def test_the_faster_way_is_found_and_kept(seed, rows):
    """A draft that is always late: turns, which make 1.5 times as much. One that keeps pace: hardly ever a trial."""
    late = Rounds(ahead=80, in_turns=120, promised=130, seed=seed)
    late.share_in_turns(300, rows)
    assert late.share_in_turns(4000, rows) > 0.85

    paced = Rounds(ahead=200, in_turns=130, promised=135, seed=seed)
    assert paced.share_in_turns(4000, rows) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_a_promise_that_is_not_kept_is_tried_ever_more_rarely(seed):
    """Turns promise a half more and bring a third less: of 20,000 rounds less than one in 20 is spent on that."""
    rounds = Rounds(ahead=100, in_turns=66, promised=150, seed=seed)
    early, late = rounds.share_in_turns(2000), rounds.share_in_turns(18_000)
    assert 0 < late < early
    assert late < 0.05


def test_a_draft_that_keeps_pace_again_is_noticed():
    """A neighbour that kept the draft busy has left: from then on it drafts ahead again."""
    rounds = Rounds(ahead=80, in_turns=120, promised=130)
    assert rounds.share_in_turns(2000) > 0.7
    rounds._worth = {False: 200, True: 120}
    rounds.share_in_turns(8192)
    assert rounds.share_in_turns(2000) == 0.0


def test_nothing_is_tried_before_anything_is_known():
    rounds = Rounds(ahead=80, in_turns=120, promised=None)
    assert rounds.share_in_turns(2000) == 0.0


@pytest.mark.parametrize("told", [0, 5])
def test_a_trial_ends_where_hardly_a_round_tells_anything(told):
    """Prompts in nearly every round: a trial of turns that make a third is over after 256 rounds of all kinds."""
    rounds = Rounds(ahead=120, in_turns=40, promised=150)
    while not rounds.switch.in_turns:
        rounds.share_in_turns(1)
    for number in range(256):
        if told and number % 50 == 0:
            rounds.share_in_turns(1)
        rounds.switch.passed()
    assert not rounds.switch.in_turns


def test_a_lost_last_push_does_not_cost_the_worker_that_is_left_for_the_other_way():
    """A change waits for the end of a plan, of which word was lost: the next plan brings it."""
    pipeline = Pipeline(
        make_channel=LateChannel, outcomes="auto", depth=3, context=1024, blocks=300, draft_blocks=300, draft_wait_s=0.1
    )
    engine, drafts = pipeline.engine, pipeline.engine._drafts
    pipeline.submit("one", [1, 2, 3], max_tokens=300, ignore_eos=True)
    for number in range(100):
        engine.advance()
        engine.flush()
        pipeline.clock.now += 0.01
        while pipeline.draft.held:
            pipeline.draft.work()
        if number == 10:
            drafts._switch.in_turns = True
            pipeline.draft.replies.pop()
        while pipeline.draft.replies:
            pipeline.draft.let_through(engine)
        if pipeline.verifier.held:
            pipeline.verifier.deliver(engine)
    assert engine._drafts is drafts
    assert drafts.in_turns


def test_an_engine_whose_draft_is_always_late_takes_turns():
    """Pushes that come behind the verdict they were for bring nothing; rounds that wait for them keep drafts."""
    pipeline = Pipeline(outcomes="auto", depth=3, context=1024, blocks=300, draft_blocks=300)
    engine, drafts = pipeline.engine, pipeline.engine._drafts
    pipeline.submit("late", [1, 2, 3], max_tokens=600, ignore_eos=True)
    rounds = {True: 0, False: 0}
    while "late" not in pipeline.deltas or not pipeline.last("late").finish:
        engine.advance()
        engine.flush()
        engine.check()
        if drafts.waiting:
            pipeline.draft.deliver(engine)
            continue
        rounds[drafts.in_turns] += 1
        pipeline.clock.now += 0.01
        pipeline.verifier.deliver(engine)
        while pipeline.draft.held:
            pipeline.draft.deliver(engine)
    assert drafts.in_turns
    plain = Pipeline(draft=False, context=1024, blocks=300)
    plain.submit("late", [1, 2, 3], max_tokens=600, ignore_eos=True)
    plain.settle()
    assert pipeline.tokens("late") == plain.tokens("late")
    assert sum(rounds.values()) < 400
    assert pipeline.idle()
