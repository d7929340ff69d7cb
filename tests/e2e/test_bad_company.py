"""One bad request harms nobody else, and an engine that closes leaves nobody waiting."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tiny_models import equal_pair

from specserve.config import parse
from specserve.errors import InvalidField, SpecserveError, Unavailable
from specserve.local import LocalEngine, load_parts
from specserve.transport.messages import Failed, Verify
from specserve.types import Request, RequestId, Sampling

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    pair = equal_pair(tmp_path_factory.mktemp("pair"), kv_blocks=200, context_length=256, threads=1)
    return parse(pair | {"engine": {"depth": 3}})


@pytest.fixture
def engine(config):
    with LocalEngine(config) as running:
        yield running


def greedy(engine):
    return [each.tokens for each in engine.generate(PROMPTS, max_tokens=12, ignore_eos=True)]


def request(name, prompt, **sampling):
    return Request(RequestId(name), tuple(prompt), 12, Sampling(**({"temperature": 0.0} | sampling)), ignore_eos=True)


@pytest.mark.parametrize("temperature", [1e-50, 1e-46, 1e-30, 5e-324])
def test_a_temperature_that_rounds_to_zero_is_greedy_and_harms_nobody(engine, temperature):
    """float32 takes 1e-50 for 0; draft and target must agree on that, in any company."""
    expected = greedy(engine)
    requests = [request(f"r{n}", prompt) for n, prompt in enumerate(PROMPTS)]
    requests.append(request("tiny", PROMPTS[0], temperature=temperature))
    got = [each.tokens for each in engine.complete(requests)]

    assert got == [*expected, expected[0]]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": float("nan")},
        {"top_k": -5},
        {"min_p": 2.0},
    ],
)
def test_the_engine_checks_what_no_http_door_has_checked(engine, bad):
    """In process too, impossible options are refused by name, and the engine serves on."""
    with pytest.raises(InvalidField) as refused:
        engine.complete([request("bad", PROMPTS[0], **bad)])

    assert refused.value.param == next(iter(bad))
    assert len(greedy(engine)[0]) == 12


def test_an_empty_stop_text_is_refused(engine):
    """It would end every answer before it begins."""
    with pytest.raises(InvalidField, match="empty stop"):
        engine.generate(PROMPTS, stop=[""], max_tokens=3)

    assert len(greedy(engine)[0]) == 12


class FailsOn:
    """A verifier that breaks, without saying on which row, whenever a poisoned token is fed."""

    def __init__(self, worker, poison):
        self.worker, self.poison, self.failures = worker, poison, 0

    def handle(self, message):
        if isinstance(message, Verify) and self.poison in message.feeds.tolist():
            self.failures += 1
            return [Failed(message.round, np.empty(0, dtype=np.int64), "poisoned")]
        return self.worker.handle(message)


def test_a_batch_that_fails_as_a_whole_costs_only_the_request_at_fault(config):
    """Each row is tried alone; the one that fails again ends in an error, the others get their own text."""
    parts = load_parts(config)
    with LocalEngine(config, parts=parts) as running:
        expected = greedy(running)
    failing = FailsOn(parts.verifier, poison=77)
    with LocalEngine(config, parts=type(parts)(**{**parts_of(parts), "verifier": failing})) as running:
        results = {}

        def one(name, prompt):
            try:
                results[name] = running.complete([request(name, prompt)])[0].tokens
            except SpecserveError as error:
                results[name] = error.message

        named = [("bad", [77, 5]), *((f"r{n}", prompt) for n, prompt in enumerate(PROMPTS))]
        threads = [threading.Thread(target=one, args=each) for each in named]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert results["bad"] == "poisoned"
    assert [results[f"r{n}"] for n in range(3)] == expected
    assert failing.failures >= 1


def parts_of(parts):
    return {name: getattr(parts, name) for name in parts.__dataclass_fields__}


def test_closing_during_an_answer_ends_it(config):
    """A caller that waits gets an error, and later calls say that the engine is closed."""
    running = LocalEngine(config)
    outcome = []

    def wait():
        try:
            outcome.append(running.generate([PROMPTS[0]], max_tokens=200, ignore_eos=True))
        except Unavailable as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not running.levels().running:
        time.sleep(0.001)
    running.close()
    thread.join(timeout=10)

    assert not thread.is_alive()
    assert isinstance(outcome[0], Unavailable)
    with pytest.raises(Unavailable):
        running.levels()
    with pytest.raises(Unavailable):
        running.generate(PROMPTS)


def test_a_long_text_is_encoded_without_stopping_other_threads(engine):
    """The tokenizer lets go of the interpreter: another thread counts on meanwhile."""
    done = threading.Event()
    encoder = threading.Thread(target=lambda: (engine.tokenizer.encode("a b " * 60_000, special=True), done.set()))
    counted = 0
    encoder.start()
    while not done.is_set():
        counted += 1
        time.sleep(0.0005)
    encoder.join()

    assert counted > 10


def test_a_text_that_cannot_fit_is_known_without_encoding_it(engine):
    """Even the longest tokens there are could not bring it down to the context."""
    assert engine.tokenizer.may_fit("a" * 200, 200)
    assert not engine.tokenizer.may_fit("a" * 100_000, 200)
