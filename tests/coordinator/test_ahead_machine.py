"""Draft results may come late, twice, in any order or never: the text is the target's and all pools add up."""

from __future__ import annotations

from harness import HeldChannel, Pipeline
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from machines import histories, hold
from test_engine_machine import EngineMachine

from specserve.coordinator.either import EitherDrafts
from specserve.transport import Arrived


class LateChannel(HeldChannel):
    """Replies wait on their way back until the test lets one through; then it may take any."""

    def __init__(self, worker, peer, life=0):
        super().__init__(worker, peer, life)
        self.replies = []

    def work(self):
        if self.held:
            self.replies += self.worker.handle(self.held.popleft())

    def let_through(self, engine, which=0, keep=False):
        if self.replies:
            which %= len(self.replies)
            reply = self.replies[which] if keep else self.replies.pop(which)
            engine.receive(Arrived(self.peer, self.life, reply))

    def deliver(self, engine):
        """Everything in order, as a channel without faults would."""
        self.work()
        while self.replies:
            self.let_through(engine)


class AheadMachine(EngineMachine):
    """The machine of the engine with drafting ahead, and with a way back that loses, repeats and reorders."""

    def pipeline_of(self, **fields):
        return Pipeline(make_channel=LateChannel, **fields | {"outcomes": self.outcomes, "draft_blocks": 40})

    @initialize(
        depth=st.sampled_from([1, 3, 6]),
        blocks=st.sampled_from([16, 24]),
        slots=st.sampled_from([8, 60]),
        outcomes=st.sampled_from([1, 2, 5, 30, "auto"]),
        policy=st.sampled_from(["fixed", "adaptive"]),
    )
    def build(self, depth, blocks, slots, outcomes, policy):
        self.outcomes = outcomes
        self.start(depth, blocks, slots, policy)

    @rule()
    def the_draft_works(self):
        self.pipeline.draft.work()

    @rule(which=st.integers(0, 9))
    def a_late_push(self, which):
        self.pipeline.draft.let_through(self.pipeline.engine, which)

    @rule(which=st.integers(0, 9))
    def a_push_comes_twice(self, which):
        self.pipeline.draft.let_through(self.pipeline.engine, which, keep=True)

    @rule(which=st.integers(0, 9))
    def a_push_is_lost(self, which):
        if self.pipeline.draft.replies:
            self.pipeline.draft.replies.pop(which % len(self.pipeline.draft.replies))

    def teardown(self):
        if hasattr(self, "pipeline"):
            self.pipeline.settle()
            assert getattr(self.pipeline.draft.worker, "unfed", 0) == 0
            self.pipeline.clock.now += 30  # a worker whose last push was lost is given up
        super().teardown()


class EitherMachine(AheadMachine):
    """The same where now and then the other way of drafting is held to be the faster one."""

    @initialize(depth=st.sampled_from([1, 3, 6]), blocks=st.sampled_from([16, 24]), slots=st.sampled_from([8, 60]))
    def build(self, depth, blocks, slots):
        self.outcomes = "auto"
        self.start(depth, blocks, slots, "fixed")

    @rule()
    def the_other_way_is_faster(self):
        drafts = self.pipeline.engine._drafts
        if isinstance(drafts, EitherDrafts):
            drafts._switch.in_turns = not drafts._switch.in_turns

    @rule()
    def a_round_in_order(self):
        self.pipeline.draft.deliver(self.pipeline.engine)
        self.pipeline.step()

    def teardown(self):
        if hasattr(self, "pipeline"):
            for which in list(self.away):
                self.restart(which)
            self.pipeline.settle()
            # A worker whose push in turns was lost is given up as one that hangs.
            self.pipeline.clock.now += self.pipeline.config.engine.hang_after_s
        super().teardown()


@histories(30, 300)
def test_both_ways_of_drafting_may_change_at_any_time(examples):
    """Back and forth, with pushes of either kind late, twice or lost."""
    hold(EitherMachine, examples, steps=80)


@histories(30, 300)
def test_pushes_in_any_order_change_no_text(examples):
    """Late, twice, lost, and from plans that are over."""
    hold(AheadMachine, examples, steps=60)
