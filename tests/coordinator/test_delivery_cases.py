"""Single faults between an ingress and its coordinators, one by one: what is lost is found, and made good."""

from __future__ import annotations

from delivery_model import LEASE_S, World, asking, drain, resumed, run
from toy_workers import reference

from specserve.cluster.streams import MOST_LOSSES, Stream, Streams, error_of
from specserve.coordinator import ingresses as sessions
from specserve.errors import ClientTooSlow, InvalidField
from specserve.transport.messages import Deltas, Submit
from specserve.types import Delta, Failure, Request, RequestId, RequestStats, TokenLogprob


def test_a_lost_message_is_sent_again_and_nothing_else():
    """After a gap the ingress connects again; the same coordinator goes on, and repeats no request."""
    world = asking(12)
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
    world = asking(3)
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
    world = asking(6)
    world.ways[1].frames.clear()
    world.beat()
    run(world, rounds=1)
    drain(world)
    assert not world.connected
    world.settle()
    assert world.tokens("a") == reference([1, 2, 3], 6)


def test_a_lost_cancel_is_made_good():
    """What runs for a client that has left is cancelled when the ingress connects again."""
    world = asking(40)
    run(world, rounds=4)
    world.leave("a")
    world.ways[1].frames.clear()
    world.connect()
    world.settle()
    assert world.coordinator.pipeline.idle()


def test_acknowledged_messages_are_forgotten_and_others_bounded(monkeypatch):
    """A beat's cursor empties the session; an ingress that acknowledges nothing loses it after MOST_UNREAD messages."""
    monkeypatch.setattr(sessions, "MOST_UNREAD", 8)
    world = asking(6)
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
    world = asking(40)
    run(world, rounds=3)
    world.coordinator.ingresses.lost("ingress", world.life, gone=False)
    world.clock.now += LEASE_S / 2
    run(world, rounds=1)
    assert not world.coordinator.pipeline.idle()
    world.clock.now += LEASE_S
    run(world, rounds=3)
    assert world.coordinator.pipeline.idle()

    other = asking(40)
    run(other, rounds=3)
    other.coordinator.ingresses.lost("ingress", other.life, gone=True)
    run(other, rounds=3)
    assert other.coordinator.pipeline.idle()


def test_a_loss_of_an_old_connection_says_nothing_about_the_new_one():
    """Invariant I5: what carries an old life changes no session."""
    world = World(depth=0)
    world.connect()
    world.connect()
    world.coordinator.ingresses.lost("ingress", 0, gone=True)
    assert world.coordinator.ingresses.deadline_s is None
    assert not world.coordinator.ingresses.current("ingress", 0)


def test_a_request_that_ends_every_coordinator_is_given_up():
    """After MOST_LOSSES coordinators without one more token it fails; one that gets tokens goes on for ever."""
    world = World(depth=0)
    world.connect()
    world.ask("poison", [1], 8)
    for _ in range(MOST_LOSSES):
        world.kill()
        world.connect()
    world.read()
    assert "was lost 3 times" in world.deltas["poison"][-1].failure.message

    world.ask("long", [2], 30)
    for _ in range(3 * MOST_LOSSES):
        run(world, rounds=4)
        drain(world)
        world.kill()
        world.connect()
    world.settle()
    assert world.tokens("long") == reference([2], 30)


def test_a_request_that_waits_for_a_place_ends_nobody():
    """Coordinators die as often as they like: what never began goes on to its text; what had a place is given up."""
    world = World(depth=0)
    world.connect()
    for number in range(6):  # four places, two wait
        world.ask(f"r{number}", [number], 12)
    for _ in range(3 * MOST_LOSSES):
        run(world, rounds=1)
        while world.ways[0].frames and "Deltas" not in str(world.ways[0].frames[0]):
            world.carry(world.ways[0])
        world.kill()
        world.connect()
        world.read()
        if len(world.open) < 6:
            break
    assert sorted(world.open) == ["r4", "r5"]
    world.settle()
    assert all(world.tokens(f"r{number}") == reference([number], 12) for number in (4, 5))


def test_who_comes_while_a_round_is_computed_waits():
    """It is told so before the verdict: should that round end the coordinator, it is not to blame."""
    world = asking(12)
    run(world, rounds=0)
    for item in iter(lambda: world.coordinator.mailbox.get(0), None):
        world.coordinator.loop._take(item)
    world.coordinator.pipeline.engine.advance()  # the round of "a" is under way
    world.ask("b", [4, 5], 12)
    while world.ways[1].frames:
        world.carry(world.ways[1])
    for item in iter(lambda: world.coordinator.mailbox.get(0), None):
        world.coordinator.loop._take(item)
    world.coordinator.pipeline.engine.advance()
    drain(world)
    world.hear()
    assert [name for name, stream in world.open.items() if stream.waits] == ["b"]
    world.settle()
    assert world.tokens("b") == reference([4, 5], 12)


def test_a_preempted_request_waits_and_one_that_begins_after_all_does_not():
    """Its ingress hears of both before anything is done for it."""
    world = World(depth=0)
    world.connect()
    for number in range(5):
        world.ask(f"r{number}", [number], 30)
    run(world, rounds=1)
    drain(world)
    assert [name for name, stream in world.open.items() if stream.waits] == ["r4"]
    scheduler = world.coordinator.pipeline.engine._scheduler
    scheduler.preempt(scheduler.running[-1])
    scheduler.waiting.rotate(-1)  # r4 is first
    while "r4" not in world.working_on():
        run(world, rounds=1)
    drain(world)
    assert [name for name, stream in world.open.items() if stream.waits] == ["r3"]


def test_ways_that_are_lost_are_no_fault_of_a_request():
    """The same coordinator loses its ingress again and again, and each time ends its session: the answer is whole."""
    world = asking(12)
    for _ in range(3 * MOST_LOSSES):
        world.ways[1].frames.clear()
        world.coordinator.ingresses.lost("ingress", world.life, gone=True)
        run(world, rounds=1)
        assert world.coordinator.pipeline.idle()
        world.connect()
    world.settle()
    assert world.tokens("a") == reference([1, 2, 3], 12)


def test_an_answer_that_is_refused_elsewhere_goes_on_from_where_its_client_is():
    """Only what was never begun anywhere is offered as a new request."""
    one = stream()
    assert one.submission(10.0, "a").before is None
    one.take(Delta(RequestId("a"), (), finish="error", failure=Failure(503, "unavailable", "dead")), 11.0)
    assert one.lost()
    one.go_on()
    assert one.submission(11.0, "b").before is None
    one.take(delta(5), 12.0)
    one.take(Delta(RequestId("a"), (), finish="error", failure=Failure(503, "unavailable", "dead")), 13.0)
    assert one.lost()
    one.go_on()
    again = one.submission(14.0, "c")
    assert again.request.answer == (5,)
    assert again.before is not None
    assert one.losses == 0


def test_the_field_that_a_coordinator_refuses_is_named_to_the_client():
    """The refusal crosses the wire in a delta, and is raised as the error that it was."""
    world = World(depth=0)
    world.connect()
    world.ask("a", [1, 2, 3], 5, stop=("",))
    world.settle()
    error = error_of(world.deltas["a"][-1].failure)
    assert isinstance(error, InvalidField)
    assert error.param == "stop"


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
    assert one.submission(10.0, "e") == Submit(one.request)
    again = one.submission(11.0, "e")
    assert (again.request.prompt_logprobs, again.request.answer, again.before.first_token_s) == (1, (), 0.0)
    scores = (TokenLogprob(1, None), TokenLogprob(2, -1.0))
    one.take(delta(5, 6, kept=1, offered=3, prompt_logprobs=scores, accepted_prediction=1, rejected_prediction=2), 12.0)
    one.take(delta(7, kept=0, offered=2, rejected_prediction=2), 13.0)
    again = one.submission(15.0, "e")
    assert (again.request.prompt_logprobs, again.request.logprobs) == (None, 1)
    assert again.request.answer == (5, 6, 7)
    assert again.before == RequestStats(2, 3, 2, 5, 1, (1, 1), 0.0, 2.0, 5.0, 1, 4)


def test_a_client_that_does_not_read_is_given_up(monkeypatch):
    """Its buffer is bounded: then the request is cancelled, and what it finds at the end says why."""
    monkeypatch.setattr("specserve.cluster.streams.MOST_UNREAD", 2)
    streams = Streams()
    slow = Stream(Request(RequestId("a"), (1,), 9), 0.0)
    streams.open(slow)
    slow.submission(0.0, "e")
    cancels = [streams.take(Deltas(number, (delta(number),)), 0.0) for number in range(1, 6)]
    assert [bool(each) for each in cancels] == [False, False, True, False, False]
    *_, last = [slow.unread.get_nowait() for _ in range(slow.unread.qsize())]
    assert last.failure.code == ClientTooSlow.code
    assert slow.unread.empty()
    assert streams.close(slow) is None
