"""The adaptive depth policy in the engine, with workers that take a device's time by the test's clock."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from itertools import pairwise

import pytest
from harness import HeldChannel, Pipeline
from toy_workers import VOCAB, ToyDraft, next_token, reference

from specserve.coordinator.drafting_switch import DraftingSwitch
from specserve.models._device_profile import load
from specserve.transport.messages import Plan, PlanAhead, Push, Verify

NEVER, ALWAYS = 1, 10**9
"""The toy draft's `miss` at which it is always wrong, or always right."""


class CountedChannel(HeldChannel):
    """Remembers the plans that went to the draft."""

    def __init__(self, worker, peer, life=0):
        super().__init__(worker, peer, life)
        self.plans = []

    def send(self, message):
        super().send(message)
        if isinstance(message, Plan | PlanAhead):
            self.plans.append(message)


class TimedDraft(ToyDraft):
    """Says how long its steps took; at R = 0 the pipeline's clock stands still for that long."""

    step_s = 0.0

    def handle(self, message):
        return [
            replace(reply, busy_s=self.step_s * max(1, int(message.depths.max(initial=0))))
            if isinstance(reply, Push)
            else reply
            for reply in super().handle(message)
        ]


class Timed(Pipeline):
    """plain_s is a plain round's time, slot_s what each draft adds, step_s what the draft takes for a step."""

    def __init__(self, *, plain_s=0.010, jump_s=0.001, slot_s=0.0, step_s=0.0025, policy="adaptive", **fields):
        size = {"context": 4096, "blocks": 4096, "draft_blocks": 8192, "slots": 4096, "prefill_chunk": 40}
        super().__init__(
            **{"depth": 6, "depth_policy": policy, "max_batch_tokens": 512, "max_requests": 64, "end": 1000}
            | size
            | fields,
            make_draft=lambda: TimedDraft(miss=NEVER),
            make_channel=CountedChannel,
        )
        self.plain_s, self.jump_s, self.slot_s, self.step_s = plain_s, jump_s, slot_s, step_s
        self.history = []  # chain lengths of each round
        if self.draft is not None:
            self.draft.worker.step_s = step_s

    def step(self):
        self.engine.advance()
        self.engine.flush()
        serial = self.config.engine.outcomes == 0
        if self.draft is not None and self.draft.held:
            message = self.draft.held[0]
            if serial and isinstance(message, Plan):
                self.clock.now += self.draft_time(message)
            self.draft.deliver(self.engine)
            return True
        if not self.verifier.held:
            return False
        if isinstance(self.verifier.held[0], Verify):
            message = self.verifier.held[0]
            self.clock.now += self.verify_time(message)
            self.history.append(message.chain_lengths.tolist())
        self.verifier.deliver(self.engine)
        return True

    def draft_time(self, plan):
        return self.step_s * max(1, int(plan.depths.max(initial=0)))

    def verify_time(self, batch):
        slots = int(batch.chain_lengths.sum())
        return self.plain_s + (self.jump_s + self.slot_s * slots if slots else 0.0)

    def rounds(self, count):
        """So many more rounds."""
        until = len(self.history) + count
        while len(self.history) < until:
            assert self.step(), "the requests are over"
        self.engine.check()

    def deepest(self, last):
        return [max(chains) for chains in self.history[-last:]]

    @property
    def switch(self):
        return self.engine._policy._switch


def running(requests=1, max_tokens=3000, prompt=4, **fields):
    pipeline = Timed(**fields)
    for index in range(requests):
        pipeline.submit(f"r{index}", [index, 2, 3, 4][:prompt], max_tokens=max_tokens)
    return pipeline


@pytest.mark.parametrize("outcomes", [0, "auto"])
def test_text_does_not_depend_on_the_policy(outcomes):
    """Eight requests, a draft that is often wrong, switched on and off: the target's own text, and nothing is held."""
    pipeline = running(8, max_tokens=120, outcomes=outcomes, slot_s=0.0005)
    pipeline.draft.worker.miss = 2
    pipeline.settle(20000)

    for index in range(8):
        assert pipeline.tokens(f"r{index}") == reference([index, 2, 3, 4], 120)
    assert pipeline.idle()


@pytest.mark.parametrize("outcomes", [0, "auto"])
def test_drafts_that_are_never_kept_turn_drafting_off(outcomes):
    """Nothing kept: from round 300 at most one in eight drafts anything, and the time is plain decoding's within 3%."""
    pipeline = running(outcomes=outcomes)
    pipeline.rounds(300)
    began = pipeline.clock.now
    pipeline.rounds(600)

    assert sum(depth > 0 for depth in pipeline.deepest(600)) < 75
    assert pipeline.clock.now - began < 600 * pipeline.plain_s * 1.03


def test_off_means_no_draft_message_at_all():
    """R = 0: between two trials no plan is sent and no round waits; each of a trial's rounds is one plan."""
    pipeline = running()
    pipeline.rounds(400)
    plans, trials = len(pipeline.draft.plans), 0
    for _ in range(200):
        before = len(pipeline.draft.plans)
        pipeline.rounds(1)
        trials += pipeline.deepest(1) != [0]
        if pipeline.deepest(1) == [0]:
            assert len(pipeline.draft.plans) - before <= 1  # that of the next round, if it is a trial
    assert len(pipeline.draft.plans) - plans <= trials + 1
    assert trials <= 200 // 24 + 1


@pytest.mark.parametrize("outcomes", [0, 2])
def test_drafting_comes_back_when_drafts_are_kept_again(outcomes):
    """Off for 200 rounds; then the draft is always right: within 300 rounds whole chains are checked in most rounds."""
    pipeline = running(outcomes=outcomes, depth=3)
    pipeline.rounds(200)
    assert not pipeline.switch.on
    pipeline.draft.worker.miss = ALWAYS
    pipeline.rounds(300)

    assert pipeline.switch.on
    assert sum(depth == 3 for depth in pipeline.deepest(40)) >= 30


def test_a_steep_verification_turns_drafting_off_at_high_acceptance():
    """16 requests whose draft is right: where each slot costs a third of a round per token, plain decoding is best."""
    pipeline = running(16, slot_s=0.003, step_s=0.0)
    pipeline.draft.worker.miss = ALWAYS
    pipeline.rounds(100)
    began = pipeline.clock.now
    pipeline.rounds(150)

    assert sum(map(sum, pipeline.history[-150:])) < 0.05 * 16 * 6 * 150
    assert pipeline.clock.now - began < 150 * pipeline.plain_s * 1.03


def test_full_chains_where_they_cost_nothing():
    """A flat verification and a draft that is right: the whole depth in nearly every round."""
    pipeline = running(4, max_tokens=2000, step_s=0.0)
    pipeline.draft.worker.miss = ALWAYS
    pipeline.rounds(120)

    assert sum(depth == 6 for depth in pipeline.deepest(100)) >= 90


def test_each_request_gets_its_own_depth():
    """Two requests of which the draft knows one: chains go to that one, when each slot costs a tenth of a round."""
    pipeline = running(2, slot_s=0.001, step_s=0.0)
    worker = pipeline.draft.worker
    right = worker._guess
    worker.miss = ALWAYS
    worker._guess = lambda prefix: right(prefix) if prefix[0] == 0 else (right(prefix) + 1) % 90
    pipeline.rounds(200)

    first, second = (sum(column) for column in zip(*pipeline.history[-60:], strict=True))
    assert first > 4 * second


def test_depth_stays_within_the_deployments_and_the_requests_own():
    """No chain is longer than engine.depth, nor than the request asked for; 0 asks for none."""
    pipeline = running(0, step_s=0.0, depth=5)
    for index, depth in enumerate([None, 0, 2]):
        pipeline.submit(f"r{index}", [index, 2, 3], max_tokens=900, depth=depth)
    pipeline.draft.worker.miss = ALWAYS
    pipeline.rounds(120)

    deepest = [max(column) for column in zip(*(each for each in pipeline.history if len(each) == 3), strict=True)]
    assert deepest == [5, 0, 2]


def test_the_draft_catches_up_while_it_is_idle():
    """R > 0 and off: what the draft lacks stays below 48 tokens, by plans that draft nothing, few and far between."""
    pipeline = running(12, outcomes="auto")
    pipeline.rounds(400)
    states = pipeline.engine._states.values()
    before, lacking = len(pipeline.draft.plans), 0
    for _ in range(200):
        pipeline.rounds(1)
        lacking = max(lacking, *(len(state.tokens) - state.draft_cached for state in states))

    feeds = [plan for plan in pipeline.draft.plans[before:] if not plan.branch_counts.sum()]
    assert not pipeline.switch.on
    assert lacking <= 48
    assert 200 // 48 <= len(feeds) <= 200 // 4


def test_a_guesser_that_knows_nothing_right_is_no_longer_asked():
    """A model-free speculator costs only verification; where its guesses are wrong that is saved, and told."""
    asked = []

    class Wrong:
        def open(self, row, tokens): ...
        def extend(self, row, tokens): ...
        def close(self, row): ...
        def guess(self, row, depth):
            asked.append(depth)
            return [96] * depth

    pipeline = running(draft=False, guesser=Wrong())
    pipeline.rounds(300)
    asked.clear()
    pipeline.rounds(300)

    assert len(asked) < 30
    told = re.findall(r'^specserve_spec_decode_fallback_total.*reason="(\w+)"\} (\S+)', pipeline.metrics.render(), re.M)
    plain = {reason: float(count) for reason, count in told}
    assert plain["load"] > 250
    assert plain["request"] == 0


def flips(gains):
    switch = DraftingSwitch(1)
    switch.look(2.0)
    states = []
    for gain in gains:
        for _ in range(8):
            if switch.advance():
                switch.look(gain)
        states.append(switch.on)
    return sum(before != after for before, after in pairwise(states))


def test_gains_around_one_do_not_switch_back_and_forth():
    """Hysteresis: noise of 2% around 1.03 never turns drafting off; a lasting change does, and back."""
    assert flips([1.04, 1.01, 1.04, 1.01, 1.02, 1.03, 1.05, 1.01] * 5) == 0
    assert flips([1.3] * 5 + [0.8] * 5 + [1.3] * 5) == 2


def trials_that_lose(loss, rounds, *, came=()):
    """The rounds in which trials of one round begin while drafting is off, each of which loses so much."""
    switch = DraftingSwitch(1)
    trials = []
    for number in range(rounds):
        switch.advance()
        if switch.consider_trial(True, number in came):
            trials.append(number)
            switch.charge(loss)
    return trials


@pytest.mark.parametrize(("loss", "gap"), [(0.3, 43), (0.5, 71), (1.0, 143), (0.01, 25)])
def test_trials_lose_seven_thousandths_of_the_time(loss, gap):
    """Once what was saved is used up, a trial that loses half a round is followed by seventy without."""
    trials = trials_that_lose(loss, rounds=3000)
    assert len([each for each in trials if each >= 1000]) == pytest.approx(2000 / gap, rel=0.1)


def test_a_new_request_is_a_reason_for_a_trial():
    """It comes at once, where the last one is four rounds ago and there is something in the account."""
    assert trials_that_lose(0.1, rounds=60, came=[10, 12, 33]) == [3, 10, 33, 58]
    assert trials_that_lose(99.0, rounds=200, came=[10, 12, 33]) == [3]


def test_a_request_that_is_left_alone_gets_its_drafts_back_at_once():
    """Nine whose drafts do not pay, and one of them that goes on: it is looked at when the others are gone."""
    pipeline = running(9, max_tokens=160, slot_s=0.003)
    pipeline.draft.worker.miss = ALWAYS
    pipeline.submit("long", [50, 2, 3, 4], max_tokens=3000)
    pipeline.rounds(40)
    assert not pipeline.switch.on
    while len(pipeline.history[-1]) > 1:
        pipeline.rounds(1)
    pipeline.rounds(12)
    assert max(pipeline.deepest(8)) > 0


def test_what_is_owed_for_a_trial_is_paid_back_within_250_rounds():
    """However much was lost while drafting was on by its word."""
    switch = DraftingSwitch(1, 32)
    switch.look(1.2)
    for _ in range(30):
        switch.advance()
        switch.charge(1.0)
    switch.look(0.9)
    waited = 0
    while not switch.consider_trial(True, new=False):
        switch.advance()
        waited += 1
    assert 150 < waited < 250


def promised_in_vain(probation, rounds):
    """The share of rounds lost where each trial turns drafting on, which then makes a twentieth less than plain."""
    switch = DraftingSwitch(1, probation)
    lost = 0.0
    for number in range(rounds):
        tried = switch.trying
        if switch.advance():
            switch.look(1.2 if tried else 0.95)
        switch.consider_trial(not switch.on, new=False)
        if number >= rounds // 2:
            lost += 0.05 * switch.active
        if switch.charging and switch.active:
            switch.charge(0.05)
    return lost / (rounds - rounds // 2)


def test_what_a_trial_promised_in_vain_is_charged_to_it():
    """What drafting loses in the eight rounds until it is looked at again; with a probation no more than trials may."""
    assert promised_in_vain(0, 6000) > 0.011
    assert promised_in_vain(32, 6000) < 0.0075


class Hindered(Timed):
    """The draft takes two rounds for its drafts, in which the target takes half as long again."""

    asked = False  # for drafts before the last round

    def step(self):
        self.engine.advance()
        self.engine.flush()
        held = self.draft.held
        drafting = bool(held) and isinstance(held[0], PlanAhead) and held[0].branch_counts.any()
        if isinstance(self.verifier.held[0], Verify):
            self.clock.now += self.plain_s * (1.5 if drafting else 1.0)
            self.history.append(self.verifier.held[0].chain_lengths.tolist())
        self.verifier.deliver(self.engine)
        if held and (self.asked or not drafting):
            self.draft.deliver(self.engine)
        self.asked = drafting and not self.asked
        return True


def test_drafts_that_are_always_late_and_slow_their_host_down_lose_next_to_nothing():
    """Nothing of them is ever checked, but they are made beside rounds, which pay for it: 0.97 of plain decoding."""
    pipeline = Hindered(outcomes=1)
    for index in range(8):
        pipeline.submit(f"r{index}", [index, 2, 3, 4], max_tokens=3000)
    pipeline.rounds(300)
    began, planned = pipeline.clock.now, len(pipeline.draft.plans)
    pipeline.rounds(600)

    assert len(pipeline.draft.plans) > planned
    assert pipeline.clock.now - began < 600 * pipeline.plain_s / 0.97


class OnProfile(Timed):
    """Steps take the times of a published pair of devices; the draft is right with a chance, by hash."""

    def __init__(self, *, acceptance, **fields):
        super().__init__(max_batch_tokens=1024, **fields)
        self.device = load("qwen3-32b-0.6b-h100")
        self.draft.worker._guess = lambda prefix: guess(prefix, acceptance)

    def draft_time(self, plan):
        draft, rows = self.device.draft, len(plan.rows)
        steps = max(1, int(plan.depths.max(initial=0)))
        taken = draft.step_s(rows, int(plan.feed_lengths.sum())) + (steps - 1) * draft.step_s(rows, rows)
        self.draft.worker.step_s = taken / steps
        return taken

    def verify_time(self, batch):
        return self.device.target.step_s(len(batch.rows), int(batch.feed_lengths.sum() + batch.chain_lengths.sum()))


def guess(prefix, acceptance):
    right = next_token(prefix)
    chance = zlib.crc32(str(prefix[-6:]).encode()) % 10000 / 10000
    return right if chance < acceptance else (right + 1) % VOCAB


def speed(requests, rounds, warm, **fields):
    """Tokens per second, as many times those of plain decoding."""
    pipeline = OnProfile(**fields)
    for index in range(requests):
        pipeline.submit(f"r{index}", [index, 2, 3, 4], max_tokens=3000)
    pipeline.rounds(warm)
    began, before = pipeline.clock.now, sum(len(state.tokens) for state in pipeline.engine._states.values())
    pipeline.rounds(rounds)
    tokens = sum(len(state.tokens) for state in pipeline.engine._states.values()) - before
    return tokens / (pipeline.clock.now - began) * pipeline.device.target.step_s(requests, requests) / requests


@pytest.mark.full
@pytest.mark.parametrize("outcomes", [0, 1])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.78])
@pytest.mark.parametrize("requests", [1, 8, 32, 64])
def test_never_slower_than_plain_decoding_nor_much_slower_than_a_good_fixed_depth(outcomes, acceptance, requests):
    """On a published pair of devices: at least 0.97 of plain decoding; where drafts pay, 0.93 of depth 4."""
    rounds, warm = {1: (400, 120), 8: (150, 60)}.get(requests, (60, 60))
    case = {"outcomes": outcomes, "acceptance": acceptance}
    adaptive = speed(requests, rounds, warm, depth=6, **case)

    assert adaptive >= 0.97
    if acceptance > 0.5:
        assert adaptive >= 0.93 * speed(requests, rounds, 6, depth=4, policy="fixed", **case)
