"""Any order of admissions, messages, cancels, losses: invariants I1–I5 hold and the text is the target's."""

from __future__ import annotations

from harness import Pipeline
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machines import histories, hold
from toy_workers import ToyVerifier, reference

from specserve.coordinator.requests import MOST_LOSSES
from specserve.errors import Overloaded
from specserve.types import Sampling


class EngineMachine(RuleBasedStateMachine):
    """The pools are small on purpose: preemption, draft eviction and slot shortage happen all the time."""

    def pipeline_of(self, **settings):
        """The workers under test."""
        return Pipeline(**settings)

    def options(self, number):
        """Sampling options of request `number`."""
        return Sampling(temperature=0)

    def answer(self, prompt, count, number):
        """What request `number` must say."""
        return reference(prompt, count)

    @initialize(
        depth=st.sampled_from([0, 1, 3, 6]),
        blocks=st.sampled_from([16, 24]),
        slots=st.sampled_from([6, 20]),
        policy=st.sampled_from(["fixed", "adaptive"]),
    )
    def build(self, depth, blocks, slots, policy):
        self.start(depth, blocks, slots, policy)

    def start(self, depth, blocks, slots, policy="fixed"):
        """An empty pipeline."""
        self.pipeline = self.pipeline_of(
            depth=depth,
            depth_policy=policy,
            blocks=blocks,
            draft_blocks=16,
            slots=max(depth, slots),
            end=1000,
            queue_limit=3,
            max_requests=4,
            max_batch_tokens=24,
        )
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.cancelled: set[str] = set()
        self.away: set[str] = set()
        self.losses: dict[str, tuple[int, int]] = {}

    @rule(
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        depth=st.sampled_from([None, 0, 1]),
        branches=st.sampled_from([1, 1, 3]),
        after=st.integers(0, 9),
    )
    def submit(self, length, max_tokens, depth, branches, after):
        """One prompt, alone or as a family that shares it; it may go on from an earlier prompt and its answer."""
        prompt = [*self.beginning(after), *((13 * len(self.prompts) + i) % 90 for i in range(length))][:40]
        family = f"r{len(self.prompts)}" if branches > 1 else None
        if depth is not None:
            depth = min(depth, self.pipeline.config.engine.depth)
        for branch in range(branches):
            name = f"r{len(self.prompts)}"
            fields = {"family": family, "branch": branch, "sampling": self.options(len(self.prompts))}
            try:
                self.pipeline.submit(name, prompt, max_tokens, depth=depth, **fields)
            except Overloaded:
                return
            self.prompts[name] = (prompt, max_tokens)

    def beginning(self, after):
        """What an earlier request said, or nothing."""
        if after >= len(self.prompts):
            return []
        prompt, count = self.prompts[f"r{after}"]
        return (prompt + self.answer(prompt, count, after))[: 5 * after + 9]

    @rule(which=st.integers(0, 200))
    def cancel(self, which):
        if self.prompts:
            name = f"r{which % len(self.prompts)}"
            if name in self.pipeline.engine._states:
                self.cancelled.add(name)
            self.pipeline.engine.cancel(name)

    @rule(count=st.integers(1, 12))
    def run(self, count):
        for _ in range(count):
            self.pipeline.step()

    @rule()
    def advance(self):
        self.pipeline.engine.advance()
        self.pipeline.engine.flush()

    @rule(seconds=st.sampled_from([0.1, 3.0]))
    def wait(self, seconds):
        self.pipeline.clock.now += seconds

    @rule()
    def deliver_to_the_verifier_first(self):
        if self.pipeline.verifier.held and not self.pipeline.verifier.closed:
            self.pipeline.verifier.deliver(self.pipeline.engine)

    @rule(which=st.sampled_from(["draft", "target"]))
    def lose(self, which):
        if which not in self.away:
            self.away.add(which)
            self.note_loss(which)
            self.pipeline.lose(which)

    def note_loss(self, which):
        """Who was in the batch of a verifier that is lost, and how often since a token of it."""
        current = self.pipeline.engine._round
        for entry in () if current is None or which != "target" else current.rows:
            state = entry.state
            tokens, losses = self.losses.get(state.request.id, (len(state.tokens), 0))
            self.losses[state.request.id] = (len(state.tokens), 1 + (losses if tokens == len(state.tokens) else 0))

    @rule(which=st.sampled_from(["draft", "target"]))
    def restart(self, which):
        if which not in self.away:
            self.note_loss(which)
        self.away.discard(which)
        self.pipeline.restart(which)

    @rule(which=st.integers(0, 200), left=st.integers(0, 40))
    def forget_state(self, which, left):
        worker = self.pipeline.verifier.worker
        if isinstance(worker, ToyVerifier) and worker.opened:  # a real one loses nothing by itself
            rows = list(worker.opened)
            worker.lost[rows[which % len(rows)]] = left

    @invariant()
    def pools_add_up(self):
        if hasattr(self, "pipeline"):
            self.pipeline.engine.check()

    def teardown(self):
        if not hasattr(self, "pipeline"):
            return
        for which in list(self.away):
            self.restart(which)
        self.pipeline.settle()
        for number, (name, (prompt, max_tokens)) in enumerate(self.prompts.items()):
            answer = self.answer(prompt, max_tokens, number)[: 64 - len(prompt)]
            got = self.pipeline.tokens(name)
            assert got == answer[: len(got)], name
            last = self.pipeline.last(name)
            given_up = self.losses.get(name, (0, 0))[1] >= MOST_LOSSES
            assert last.finish == ("abort" if name in self.cancelled else "error" if given_up else "length")
            assert name in self.cancelled or given_up or len(got) == len(answer)
        assert self.pipeline.idle()


@histories(30, 300)
def test_any_order_of_events_gives_the_targets_text(examples):
    """Admissions, cancels, losses, preemption; under a fixed and an adaptive depth."""
    hold(EngineMachine, examples, steps=60)
