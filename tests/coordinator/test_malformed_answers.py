"""What a worker says may be anything that the wire can carry: the coordinator goes on, and its pools add up."""

from __future__ import annotations

import random

import pytest
from harness import Pipeline
from mutations import mutated
from test_ahead_machine import LateChannel
from toy_workers import reference

from specserve.errors import ProtocolError
from specserve.transport.messages import pack, unpack

PROMPTS = {"a": [1, 2, 3], "b": [4, 5, 6, 7, 8, 9], "c": [10]}
TOKENS = 12


def spoilt(pipeline, role, chance):
    """Run one message of a worker, and change one field of one of its answers. False where there was none."""
    channel = pipeline.draft if role == "draft" else pipeline.verifier
    channel.work()
    if not channel.replies:
        return False
    place = chance.randrange(len(channel.replies))
    channel.replies[place : place + 1] = carried(mutated(channel.replies[place], chance))
    while channel.replies:
        channel.let_through(pipeline.engine)
    return True


def carried(message):
    """What of a message arrives over the wire: itself, or nothing."""
    try:
        return [unpack([bytes(frame) for frame in pack(message)])]
    except ProtocolError:
        return []


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("outcomes", [0, 2])
def test_no_answer_of_a_worker_breaks_the_coordinator(role, outcomes):
    """In 60 histories one answer each is spoilt: nothing raises, each request ends once, all of it comes back."""
    for seed in range(60):
        chance = random.Random(seed)
        here = Pipeline(
            make_channel=LateChannel, outcomes=outcomes, depth=3, end=1000, draft_wait_s=1.0, **shared_parts()
        )
        here.verifier = here.engine._verifier._channel = LateChannel(here.verifier.worker, "target")
        for name, prompt in PROMPTS.items():
            here.submit(name, prompt, TOKENS)
        for _ in range(chance.randrange(1, 12)):
            here.step()
        here.engine.advance()
        if not spoilt(here, role, chance):
            continue
        here.engine.advance()
        here.engine.check()
        for _ in range(3):
            for each in here.engine.away:
                here.restart(each)
                if each == "target":
                    here.verifier.__class__ = LateChannel
                    here.verifier.replies = []
            here.settle()
            here.clock.now += 1000  # whoever waits for an answer that did not come waits no longer
            here.engine.advance()
        check_ends(here, role)


def check_ends(here, role):
    """Drafts change no text, whatever they are; a target's own wrong token is its word."""
    for name, prompt in PROMPTS.items():
        last = here.last(name)
        assert last.finish in ("length", "stop", "error"), name
        if role == "draft":
            assert here.tokens(name) == reference(prompt, TOKENS)
    assert here.idle()


def shared_parts():
    from protocol_model import _shared

    return _shared()
