"""What a worker says may be anything that the wire can carry: the coordinator goes on, and its pools add up."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from harness import Pipeline
from mutations import mutated
from test_ahead_machine import LateChannel
from test_hidden_machine import ShowingVerifier
from toy_workers import ToyDraft, reference

from specserve.errors import ProtocolError
from specserve.transport.messages import Dists, Hidden, Push, PushAhead, Verdict, pack, unpack
from specserve.types import Sampling

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


def played(here, spoil, role, *, draft_answers=lambda turn: True):
    """Turns with each answer of one worker spoilt, until that worker is lost or there is nothing to do."""
    here.verifier = here.engine._verifier._channel = LateChannel(here.verifier.worker, "target")
    for turn in range(60):
        here.engine.advance()
        here.engine.flush()
        for name, channel in (("target", here.verifier), ("draft", here.draft)):
            if name in here.engine.away:
                continue
            while channel.held:
                channel.work()
            if name == role:
                channel.replies = [each for reply in channel.replies for each in carried(spoil(reply, turn))]
            while channel.replies and (name == "target" or draft_answers(turn)):
                channel.let_through(here.engine)
        here.clock.now += 0 if draft_answers(turn) else 2  # the round waits for the draft no longer
        if role in here.engine.away:
            return


def late_parts(**more):
    return {"make_channel": LateChannel, "depth": 3, "end": 1000, "draft_wait_s": 1.0, **more}


def with_widths(message, turn):
    """Pushed tokens with dists, whose width is another one every other step or plan."""
    del turn
    if isinstance(message, PushAhead):
        count, odd = int((message.places >= 0).sum()), message.step % 2
    elif isinstance(message, Push):
        count, odd = len(message.tokens), message.plan % 2
    else:
        return message
    width = 2 + odd
    return replace(message, dists=Dists("sparse", width, np.zeros((count, 6 * width), np.uint8)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("outcomes", [0, 4])
def test_dists_that_change_their_width_lose_the_draft_worker(outcomes, temperature):
    """They cannot be put together, within a plan or across plans: the worker's fault, and the requests go on."""
    here = Pipeline(outcomes=outcomes, **late_parts())
    for name, prompt in PROMPTS.items():
        here.submit(name, prompt, 30, sampling=Sampling(temperature=temperature))
    played(here, with_widths, "draft")
    assert here.engine.away == ("draft",)
    here.restart("draft")
    here.settle()
    assert all(here.last(name).finish == "length" for name in PROMPTS)


def with_hidden_widths(message, turn):
    """Hidden states whose width is another one every other turn."""
    if not isinstance(message, Verdict) or not len(message.hidden.rows):
        return message
    return replace(
        message, hidden=Hidden("float32", np.zeros((len(message.hidden.rows), 8 + 4 * (turn % 2)), np.uint8))
    )


@pytest.mark.parametrize("outcomes", [0, 4])
def test_hidden_states_that_change_their_width_lose_the_verifier(outcomes):
    """States wait while the draft is late, several verdicts' together: the verifier's fault, and the next is well."""
    here = Pipeline(
        outcomes=outcomes, make_draft=ToyDraft, make_verifier=ShowingVerifier, reads_hidden=True, **late_parts()
    )
    for name, prompt in PROMPTS.items():
        here.submit(name, prompt, TOKENS)
    played(here, with_hidden_widths, "target", draft_answers=lambda turn: turn % 3 == 2)
    assert here.engine.away == ("target",)
    here.restart("target")
    here.settle()
    for name, prompt in PROMPTS.items():
        assert here.last(name).finish == "length"
        assert here.tokens(name) == reference(prompt, TOKENS)
