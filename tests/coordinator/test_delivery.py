"""Streams between an ingress and its coordinators: nothing is lost, repeated or changed, whatever the wire does."""

from __future__ import annotations

import pytest
from delivery_model import LEASE_S, World, whole
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from toy_workers import reference

from specserve.cluster.streams import MOST_TRIES, Stream, Streams
from specserve.coordinator import ingresses as sessions
from specserve.coordinator.ingresses import Ingresses
from specserve.errors import ClientTooSlow
from specserve.transport.messages import Deltas, Submit
from specserve.types import Delta, Failure, Request, RequestId, RequestStats, TokenLogprob


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
                assert refused(last.failure), last.failure
        assert self.world.coordinator.pipeline.idle()


def tampered(frames, how):
    """The first frame under way is lost, comes twice, or is overtaken by all others."""
    if frames and how == "lose":
        frames.popleft()
    elif frames and how == "repeat":
        frames.appendleft(frames[0])
    else:
        frames.rotate(-1)


def refused(failure: Failure) -> bool:
    """A queue that is full, or a request that was under way MOST_TRIES times without a token."""
    return failure.code == "queue_full" or "interrupted" in failure.message


def search(machine: type[DeliveryMachine], examples: int = 100) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        ),
    )


def test_nothing_is_lost_repeated_or_changed():
    """Whatever the wire and the coordinators do, each client gets the target's answer once, and nothing stays held."""
    search(DeliveryMachine)


class KeepsCursor(Streams):
    """Counts on where another coordinator stopped."""

    def welcomed(self, known, now_s):
        cursor = self.cursor
        messages = super().welcomed(known, now_s)
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
    world = World(depth=0, **broken)
    world.connect()
    world.ask("a", [1, 2, 3], 12)
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
    world = World(ingresses=SendsNothingAgain, depth=0)
    world.connect()
    world.ask("a", [1, 2, 3], 12)
    run(world, rounds=4)
    world.ways[0].frames.popleft()
    run(world, rounds=2)
    world.beat()
    drain(world)
    assert not world.connected
    world.settle()
    assert world.tokens("a") == reference([1, 2, 3], 12)
    assert resumed(world) == 1


def run(world: World, rounds: int) -> None:
    """Carry what is there to the coordinator, and let it work; nothing is carried back."""
    while world.ways[1].frames:
        world.carry(world.ways[1])
    for _ in range(rounds):
        world.coordinator.step()


def drain(world: World) -> None:
    """Everything that is under way arrives."""
    for way in world.ways:
        while way.frames:
            world.carry(way)


def resumed(world: World) -> int:
    """How often the present coordinator took a request up again."""
    lines = world.coordinator.pipeline.metrics.render().splitlines()
    (line,) = [line for line in lines if line.startswith("specserve_requests_resumed_total")]
    return int(float(line.rsplit(" ", 1)[1]))


def test_a_lost_message_is_sent_again_and_nothing_else():
    """After a gap the ingress connects again; the same coordinator goes on, and repeats no request."""
    world = World(depth=0)
    world.connect()
    world.ask("a", [1, 2, 3], 12)
    run(world, rounds=4)
    world.ways[0].frames.popleft()
    run(world, rounds=2)
    world.beat()
    drain(world)
    assert not world.connected
    world.settle()
    assert world.tokens("a") == reference([1, 2, 3], 12)
    assert resumed(world) == 0


def test_a_lost_last_message_shows_in_the_next_beat():
    """Nothing follows the end of an answer but the heart, and that is enough."""
    world = World(depth=0)
    world.connect()
    world.ask("a", [1, 2, 3], 3)
    run(world, rounds=20)
    world.ways[0].frames.clear()
    drain(world)
    assert world.connected
    world.beat()
    drain(world)
    assert not world.connected
    world.settle()
    assert world.tokens("a") == reference([1, 2, 3], 3)


def test_a_lost_request_is_asked_for():
    """The coordinator sees a gap in what the ingress sent, says so, and gets the request again."""
    world = World(depth=0)
    world.connect()
    world.ask("a", [1, 2, 3], 6)
    world.ways[1].frames.clear()
    world.beat()
    run(world, rounds=1)
    drain(world)
    assert not world.connected
    world.settle()
    assert world.tokens("a") == reference([1, 2, 3], 6)


def test_a_lost_cancel_is_made_good():
    """What runs for a client that has left is cancelled when the ingress connects again."""
    world = World(depth=0)
    world.connect()
    world.ask("a", [1, 2, 3], 40)
    run(world, rounds=4)
    world.leave("a")
    world.ways[1].frames.clear()
    world.connect()
    world.settle()
    assert world.coordinator.pipeline.idle()


def test_acknowledged_messages_are_forgotten_and_others_bounded(monkeypatch):
    """A beat's cursor empties the session; an ingress that acknowledges nothing loses it after MOST_UNREAD messages."""
    monkeypatch.setattr(sessions, "MOST_UNREAD", 8)
    world = World(depth=0)
    world.connect()
    world.ask("a", [1, 2, 3], 6)
    world.settle()
    session = world.coordinator.ingresses._sessions["ingress"]
    world.beat()
    drain(world)
    world.ask("b", [4, 5], 30)
    run(world, rounds=3)
    assert 0 < len(session.unread) < 3
    run(world, rounds=40)
    assert len(session.unread) <= 9
    assert world.coordinator.ingresses.deadline_s is None
    assert world.coordinator.pipeline.idle()
    world.connect()
    world.settle()
    assert world.tokens("b") == reference([4, 5], 30)


def test_a_silent_ingress_loses_its_requests_at_once_and_a_cut_one_after_the_lease():
    """Silence has lasted as long as the lease when it is found; a gap is forgiven for that long."""
    world = World(depth=0)
    world.connect()
    world.ask("a", [1, 2, 3], 40)
    run(world, rounds=3)
    world.coordinator.ingresses.lost("ingress", world.life, silent=False)
    world.clock.now += LEASE_S / 2
    run(world, rounds=1)
    assert not world.coordinator.pipeline.idle()
    world.clock.now += LEASE_S
    run(world, rounds=3)
    assert world.coordinator.pipeline.idle()

    other = World(depth=0)
    other.connect()
    other.ask("a", [1, 2, 3], 40)
    run(other, rounds=3)
    other.coordinator.ingresses.lost("ingress", other.life, silent=True)
    run(other, rounds=3)
    assert other.coordinator.pipeline.idle()


def test_a_loss_of_an_old_connection_says_nothing_about_the_new_one():
    """Invariant I5: what carries an old life changes no session."""
    world = World(depth=0)
    world.connect()
    world.connect()
    world.coordinator.ingresses.lost("ingress", 0, silent=True)
    assert world.coordinator.ingresses.deadline_s is None
    assert not world.coordinator.ingresses.current("ingress", 0)


def test_a_request_that_ends_every_coordinator_is_given_up():
    """After MOST_TRIES coordinators without one more token it fails; one that gets tokens goes on for ever."""
    world = World(depth=0)
    world.connect()
    world.ask("poison", [1], 8)
    for _ in range(MOST_TRIES):
        world.kill()
        world.connect()
    world.read()
    assert "interrupted" in world.deltas["poison"][-1].failure.message

    world.ask("long", [2], 30)
    for _ in range(3 * MOST_TRIES):
        run(world, rounds=4)
        drain(world)
        world.kill()
        world.connect()
    world.settle()
    assert world.tokens("long") == reference([2], 30)


def test_requests_that_were_admitted_once_keep_their_place():
    """The queue of the new coordinator is too short for all of them, and takes them; a new request is refused."""
    world = World(depth=0)
    world.connect()
    for number in range(7):  # four places, three wait
        world.ask(f"r{number}", [number], 12)
    run(world, rounds=1)
    drain(world)
    world.kill()
    world.ask("new", [50], 12)
    world.settle()
    assert world.deltas["new"][-1].failure.code == "queue_full"
    assert all(world.tokens(f"r{number}") == reference([number], 12) for number in range(7))


def delta(*tokens: int, **fields: object) -> Delta:
    return Delta(RequestId("a"), tokens, **fields)


def stream(**fields: object) -> Stream:
    return Stream(Request(RequestId("a"), (1, 2), 9, **fields), began_s=10.0)


def test_what_is_sent_again_holds_all_that_the_client_has():
    """Tokens, counts of every kind and times; the scores of the prompt are asked for until they have come."""
    one = stream(prompt_logprobs=1, logprobs=1)
    assert one.submission(10.0) == Submit(one.request)
    again = one.submission(11.0)
    assert (again.request.prompt_logprobs, again.request.answer, again.before.first_token_s) == (1, (), 0.0)
    scores = (TokenLogprob(1, None), TokenLogprob(2, -1.0))
    one.take(delta(5, 6, kept=1, offered=3, prompt_logprobs=scores, accepted_prediction=1, rejected_prediction=2), 12.0)
    one.take(delta(7, kept=0, offered=2, rejected_prediction=2), 13.0)
    again = one.submission(15.0)
    assert (again.request.prompt_logprobs, again.request.logprobs) == (None, 1)
    assert again.request.answer == (5, 6, 7)
    assert again.before == RequestStats(2, 3, 2, 5, 1, (1, 1), 0.0, 2.0, 5.0, 1, 4)


def test_a_client_that_does_not_read_is_given_up(monkeypatch):
    """Its buffer is bounded: then the request is cancelled, and what it finds at the end says why."""
    monkeypatch.setattr("specserve.cluster.streams.MOST_UNREAD", 2)
    streams = Streams()
    slow = Stream(Request(RequestId("a"), (1,), 9), 0.0)
    streams.open(slow)
    slow.submission(0.0)
    cancels = [streams.take(Deltas(number, (delta(number),)), 0.0) for number in range(1, 6)]
    assert [bool(each) for each in cancels] == [False, False, True, False, False]
    *_, last = [slow.unread.get_nowait() for _ in range(slow.unread.qsize())]
    assert last.failure.code == ClientTooSlow.code
    assert slow.unread.empty()
    assert streams.close(slow) is None
