"""Drafting ahead changes when tokens are drafted and nothing else: the same answers, the same laws."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch
from table_backend import TableBackend
from test_rules_end_to_end import COUNT, LOSSLESS, SAMPLE, MarkovBackend, answers, engine_of, p_value, transitions

from specserve import local
from specserve.coordinator import either
from specserve.coordinator import engine as coordinators
from specserve.coordinator.turns_switch import TurnsSwitch
from specserve.drafting import _ahead
from specserve.errors import Unavailable
from specserve.transport.local import ThreadChannel


class SlowMarkov(MarkovBackend):
    """A target that lets its draft come first, however busy the machine is; the draft, of another seed, waits never."""

    drafted = 0  # forwards of drafts so far

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._target = seed == 1

    def forward(self, batch):
        """The chain's rows: the target's when the draft has read and drafted, or had a while without anything to do."""
        if not self._target:
            SlowMarkov.drafted += 1
            return super().forward(batch)
        enough, latest = SlowMarkov.drafted + 4, time.monotonic() + 0.1
        while SlowMarkov.drafted < enough and time.monotonic() < latest:
            time.sleep(0.001)
        return super().forward(batch)


@pytest.mark.parametrize(
    ("rule", "outcomes", "tokens"),
    [
        ("rejection", "many", SAMPLE),
        *(
            pytest.param(rule, outcomes, 60_000, marks=pytest.mark.full)
            for rule in LOSSLESS
            for outcomes in (1, "many")
        ),
    ],
)
def test_drawn_tokens_have_the_targets_law(rule, outcomes, tokens):
    """The chains that are offered grew before the verdict was known, and the answers have the target's law."""
    outcomes = 16 if outcomes == "many" else outcomes
    assert p_value(transitions(rule, tokens, SlowMarkov, outcomes=outcomes, slots=20_000)) > 1e-3


def test_offering_what_was_compared_is_noticed(monkeypatch):
    """Were a guess that happened to be right offered as if it had been sampled, the check would see the bias."""
    grown = _ahead.AheadGrowth.take

    def likeliest(self, step, logits):
        """A broken step: drafted tokens are the likeliest ones, shipped with the dist they were not drawn from."""
        result = grown(self, step, logits)
        for index, place, _ in result.tokens:
            chain = self._chains[index]
            chain.tokens[place] = self._workspace.ranked(np.array([chain.slots[place]]))[0][0]
        result.tokens[:] = [(index, place, self._chains[index].tokens[place]) for index, place, _ in result.tokens]
        return result

    monkeypatch.setattr(_ahead.AheadGrowth, "take", likeliest)
    assert p_value(transitions("rejection", 12_000, SlowMarkov, outcomes=16, slots=20_000)) < 1e-6


class Delayed(TableBackend):
    """A backend whose forwards take a random while, so that pushes and verdicts come in any order."""

    def __init__(self, *args, seed, **options):
        super().__init__(*args, **options)
        self._random = random.Random(seed)

    def forward(self, batch):
        """The table's logits, sooner or later."""
        time.sleep(self._random.choice([0.0, 0.0, 0.001, 0.004]))
        return super().forward(batch)


def delayed(seed):
    """The table models of the other tests, each with delays of its own."""
    generator = torch.Generator().manual_seed(seed)
    return Delayed(torch.randn(16, 16, 16, generator=generator) * 1.5, context_length=64, seed=seed)


@pytest.fixture(scope="module")
def plain():
    """What the target says alone and one request at a time: greedily, and by rules whose draws a seed fixes."""
    with engine_of(draft_seed=None, depth=1) as engine:
        said = {rule: answers(engine, rule, range(COUNT), depth=0) for rule in ("coupled", "exact")}
        said["greedy"] = answers(engine, "rejection", range(COUNT), depth=0, temperature=0.0)
    return said


@pytest.mark.parametrize("outcomes", [0, 1, 4, 16, "auto"])
@pytest.mark.parametrize(
    ("rule", "greedy"),
    [
        ("coupled", False),
        ("exact", False),
        *(pytest.param(rule, True, marks=() if rule == "rejection" else pytest.mark.full) for rule in LOSSLESS),
    ],
)
def test_the_text_is_the_same_for_every_number_of_outcomes(plain, rule, greedy, outcomes):
    """Workers of random pace: greedy under every lossless rule, and at any temperature where the seed fixes all."""
    options = {"temperature": 0.0} if greedy else {}
    with engine_of(delayed, depth=3, outcomes=outcomes, slots=4000) as engine:
        assert answers(engine, rule, range(COUNT), **options) == plain["greedy" if greedy else rule]
        engine._loop.call(engine._engine.check).result()


class Restless(TurnsSwitch):
    """Holds after every third round that the other way of drafting is the faster one."""

    changes = 0

    def observe(self, *_):
        """Nothing is learned."""
        Restless.changes += 1
        if Restless.changes % 3 == 0:
            self.in_turns = not self.in_turns


@pytest.fixture
def restless(monkeypatch):
    """auto, where draft and target have hardware of their own, with changes all the time."""
    monkeypatch.setattr(Restless, "changes", 0)
    monkeypatch.setattr(either, "TurnsSwitch", Restless)
    for module in (local, coordinators):
        monkeypatch.setattr(module, "takes_turns", lambda *_: False)


@pytest.mark.parametrize(("rule", "greedy"), [("coupled", False), ("exact", False), ("block", True)])
def test_the_text_is_the_same_where_the_way_of_drafting_changes(restless, plain, rule, greedy):
    """Ahead for a few rounds, in turns for a few, ahead again: what each has cached and drafted is right for both."""
    options = {"temperature": 0.0} if greedy else {}
    with engine_of(delayed, depth=3, outcomes="auto", slots=4000) as running:
        assert answers(running, rule, range(COUNT), **options) == plain["greedy" if greedy else rule]
        running._loop.call(running._engine.check).result()
    assert Restless.changes > 3


@pytest.mark.parametrize("tokens", [SAMPLE, pytest.param(60_000, marks=pytest.mark.full)])
def test_drawn_tokens_have_the_targets_law_where_the_way_of_drafting_changes(restless, tokens):
    assert p_value(transitions("rejection", tokens, SlowMarkov, outcomes="auto", slots=20_000)) > 1e-3
    assert Restless.changes > 9


def test_workers_of_one_place_take_turns_by_themselves():
    """auto drafts ahead only where the draft has hardware of its own; a fixed number is obeyed anyway."""
    for outcomes, ahead in (("auto", False), (0, False), (1, True)):
        with engine_of(depth=3, outcomes=outcomes) as engine:
            assert isinstance(engine._channels[0], ThreadChannel) == ahead
            assert hasattr(engine._engine._drafts, "hits") == ahead


def test_no_worker_computes_when_its_engine_is_closed():
    """An interpreter that ends while a thread is inside torch is killed by it."""

    def ask():
        with pytest.raises(Unavailable):
            answers(engine, "coupled", range(COUNT))

    with engine_of(delayed, depth=3, outcomes=4) as engine:
        answering = threading.Thread(target=ask)
        answering.start()
        while not engine.levels().running:
            time.sleep(0.01)
    answering.join()
    assert not [channel for channel in engine._channels if channel._thread.is_alive()]
