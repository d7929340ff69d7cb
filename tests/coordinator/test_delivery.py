"""Streams between an ingress and its coordinators: nothing is lost, repeated or changed, whatever the wire does."""

from __future__ import annotations

import pytest
from delivery_model import LEASE_S, World, asking, drain, resumed, run, tampered, whole
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machines import histories, hold
from toy_workers import reference

from specserve.cluster.streams import MOST_LOSSES, Streams
from specserve.coordinator.ingresses import Ingresses
from specserve.types import Failure


class DeliveryMachine(RuleBasedStateMachine):
    """Any order of requests, rounds, lost, doubled and overtaking messages, dead coordinators and clients."""

    streams = Streams
    ingresses = Ingresses

    @initialize(depth=st.sampled_from([0, 3]))
    def build(self, depth):
        self.world = World(streams=self.streams, ingresses=self.ingresses, depth=depth)
        self.world.connect()
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.left: set[str] = set()
        self.ask(5, 16)
        self.ask(3, 12)

    @rule(length=st.integers(1, 12), max_tokens=st.integers(1, 16))
    def ask(self, length, max_tokens):
        name = f"r{len(self.asked)}"
        prompt = [(17 * len(self.asked) + i) % 90 for i in range(length)]
        self.asked[name] = (prompt, max_tokens)
        self.world.ask(name, prompt, max_tokens)

    @rule(which=st.integers(0, 50))
    def leave(self, which):
        names = list(self.world.open)
        if len(names) > 2:
            name = names[which % len(names)]
            self.left.add(name)
            self.world.leave(name)

    @rule(count=st.integers(1, 8), back=st.booleans())
    def work(self, count, back):
        """Rounds, with what clients ask for; what they get may stay under way."""
        for _ in range(count):
            run(self.world, rounds=2)
            if back:
                drain(self.world)
        self.world.read()

    @rule(which=st.integers(0, 1), count=st.integers(1, 6))
    def carry(self, which, count):
        for _ in range(count):
            if self.world.ways:
                self.world.carry(self.world.ways[which])
        self.world.read()

    @rule(which=st.integers(0, 1), how=st.sampled_from(["lose", "repeat", "overtake"]))
    def tamper(self, which, how):
        if self.world.ways:
            tampered(self.world.ways[which].frames, how)

    @rule()
    def beat(self):
        self.world.beat()

    @rule(seconds=st.sampled_from([0.1, LEASE_S]))
    def wait(self, seconds):
        self.world.clock.now += seconds

    @rule()
    def connect(self):
        if not self.world.connected:
            self.world.connect()

    @rule()
    def connect_though_connected(self):
        """The answer to an earlier try was lost."""
        self.world.connect()

    @rule()
    def kill(self):
        self.world.kill()

    @invariant()
    def who_waits_is_not_worked_on(self):
        """What its ingress holds for innocent of the coordinator's death has no place there."""
        if not hasattr(self, "world") or not self.world.connected or any(way.frames for way in self.world.ways):
            return
        waits = {name for name, stream in self.world.open.items() if stream.waits and not stream.ended}
        assert not waits & set(self.world.working_on())

    @invariant()
    def answers_are_the_targets(self):
        """At any moment each client has a beginning of its answer, and nothing follows an end."""
        if not hasattr(self, "world"):
            return
        self.world.coordinator.pipeline.engine.check()
        for name, (prompt, max_tokens) in self.asked.items():
            got = self.world.tokens(name)
            assert got == reference(prompt, max_tokens)[: len(got)], name
            assert not any(delta.finish for delta in self.world.deltas[name][:-1])

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.settle()
        for name in self.asked.keys() - self.left:
            prompt, max_tokens = self.asked[name]
            last = self.world.deltas[name][-1]
            if last.failure is None:
                assert self.world.tokens(name) == reference(prompt, max_tokens), name
                assert last.finish == "length"
                assert whole(last.stats, self.world.deltas[name]), name
            else:
                assert last.failure.code == "queue_full" or self.given_up(name, last.failure), last.failure
        assert self.world.coordinator.pipeline.idle()

    def given_up(self, name: str, failure: Failure) -> bool:
        """For what may have ended MOST_LOSSES coordinators; a way that was lost, however often, is nobody's fault."""
        return "was lost" in failure.message and self.world.deaths(name) >= MOST_LOSSES


@histories(25, 300)
def test_nothing_is_lost_repeated_or_changed(examples):
    """Whatever the wire and the coordinators do, each client gets the target's answer once, and nothing stays held."""
    hold(DeliveryMachine, examples, steps=30)


class KeepsCursor(Streams):
    """Counts on where another coordinator stopped."""

    def welcomed(self, engine, known, now_s):
        cursor = self.cursor
        messages = super().welcomed(engine, known, now_s)
        self.cursor = cursor
        return messages


class StartsOver(Streams):
    """Asks a new coordinator for the whole answer again."""

    def open(self, stream):
        super().open(stream)
        stream.tokens = Forgetful()


class Forgetful(list):
    def __iadd__(self, other):
        return self


class SendsNothingAgain(Ingresses):
    """Keeps nothing until it is acknowledged."""

    def deliver(self, name, deltas):
        super().deliver(name, deltas)
        if name in self._sessions:
            self._sessions[name].unread.clear()


def killed_in_mid_stream(**broken: object) -> World:
    """A world whose coordinator died when its client had a part of the answer, and in which all is well since."""
    world = asking(12, **broken)
    run(world, rounds=8)
    drain(world)
    world.read()
    assert 0 < len(world.tokens("a")) < 12
    world.kill()
    world.settle()
    return world


def test_a_stream_goes_on_with_another_coordinator():
    """The text is whole, the books are of the whole answer, and the end came once."""
    world = killed_in_mid_stream()
    last = world.deltas["a"][-1]
    assert world.tokens("a") == reference([1, 2, 3], 12)
    assert whole(last.stats, world.deltas["a"])
    assert resumed(world) == 1


def test_an_ingress_that_counts_on_or_starts_over_is_found():
    """Where an old cursor stays, the stream never ends; where the client's tokens are not told, they come again."""
    with pytest.raises(AssertionError, match="never end"):
        killed_in_mid_stream(streams=KeepsCursor)
    again = killed_in_mid_stream(streams=StartsOver)
    assert again.tokens("a") != reference([1, 2, 3], 12)


def test_a_coordinator_that_keeps_nothing_needs_every_request_again():
    """Without what was kept no session can go on: the requests are cancelled, and come again from where they were."""
    world = asking(12, ingresses=SendsNothingAgain)
    run(world, rounds=4)
    world.ways[0].frames.popleft()
    run(world, rounds=2)
    world.beat()
    drain(world)
    assert not world.connected
    world.settle()
    assert world.tokens("a") == reference([1, 2, 3], 12)
    assert resumed(world) == 1
