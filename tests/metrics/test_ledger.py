"""Many processes, one text, and no counter that falls."""

from __future__ import annotations

import itertools
import random

import pytest

from specserve.metrics import EngineMetrics, HttpMetrics, Ledger, Snapshot
from specserve.metrics.ledger import COORDINATOR

COUNTER = ("specserve_stream_errors_total", ())
GAUGE = ("specserve_http_inflight_requests", ())


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def snap(life: str, number: int, counter: float, gauge: float = 0) -> Snapshot:
    return Snapshot(life, number, {COUNTER: counter, GAUGE: gauge})


def test_processes_are_summed():
    """Counters and gauges of two replicas that both live."""
    ledger = Ledger()
    ledger.take("ingress-a", snap("a", 1, 5, 2))
    ledger.take("ingress-b", snap("b", 1, 7, 1))
    assert (ledger.values()[COUNTER], ledger.values()[GAUGE]) == (12, 3)
    assert "specserve_ingress_up 2.0" in ledger.render()


def test_a_dead_replica_keeps_its_counters_and_loses_its_gauges():
    """After the lease its requests in flight are nobody's; what it counted stays."""
    clock = Clock()
    ledger = Ledger(lease_s=10, clock=clock)
    ledger.take("ingress-a", snap("a", 1, 5, 2))
    clock.now = 11
    ledger.take("ingress-b", snap("b", 1, 7, 1))
    assert (ledger.values()[COUNTER], ledger.values()[GAUGE]) == (12, 1)


def test_a_replica_that_was_only_silent_is_not_counted_twice():
    """It comes back with the same life, and its snapshot replaces the old one."""
    clock = Clock()
    ledger = Ledger(lease_s=10, clock=clock)
    ledger.take("ingress-a", snap("a", 1, 5))
    clock.now = 100
    ledger.take("ingress-a", snap("a", 2, 6))
    assert ledger.values()[COUNTER] == 6


def test_a_new_process_in_the_same_place_adds_to_the_old_one():
    """A restarted coordinator counts from 0; the sum goes on from where it was."""
    ledger = Ledger()
    ledger.take(COORDINATOR, snap("one", 9, 40, 3))
    ledger.take(COORDINATOR, snap("two", 1, 2, 1))
    assert (ledger.values()[COUNTER], ledger.values()[GAUGE]) == (42, 1)


def test_an_overtaken_snapshot_is_dropped():
    """Two reports that arrive the wrong way round leave the newer one."""
    ledger = Ledger()
    ledger.take("ingress-a", snap("a", 2, 9))
    ledger.take("ingress-a", snap("a", 1, 8))
    assert ledger.values()[COUNTER] == 9


def test_counters_never_fall_whatever_dies():
    """Random reports, deaths, silences and late arrivals: every total is at least the one before."""
    rng, clock = random.Random(7), Clock()
    ledger, before = Ledger(lease_s=3, clock=clock), 0.0
    counts = dict.fromkeys(range(40), 0.0)
    lives, sent = dict.fromkeys(counts, 0), {place: itertools.count() for place in counts}
    for _ in range(3000):
        clock.now += rng.random()
        place = rng.randrange(40)
        if rng.random() < 0.05:
            counts[place], lives[place] = 0.0, lives[place] + 1
        counts[place] += rng.randrange(5)
        ledger.take(f"ingress-{place}", snap(f"{place}.{lives[place]}", next(sent[place]), counts[place]))
        total = ledger.values()[COUNTER]
        assert total >= before
        before = total
    assert before > 1000


def test_replicas_of_the_past_are_summed_up():
    """Thousands of replicas that came and went leave one sum, not thousands of snapshots."""
    clock = Clock()
    ledger = Ledger(lease_s=1, clock=clock)
    for number in range(500):
        clock.now += 10
        ledger.take(f"ingress-{number}", snap(str(number), 1, 1))
    assert ledger.values()[COUNTER] == 500
    assert len(ledger._entries) <= 65


@pytest.mark.parametrize("aliases", [False, True])
def test_aliases_carry_the_same_numbers(aliases):
    """Benchmark clients of vLLM find its names, with its label `engine`, where they are switched on."""
    engine = EngineMetrics("m", max_depth=1)
    ledger = Ledger(aliases=aliases)
    ledger.take(COORDINATOR, engine.snapshot())
    ledger.take("ingress-a", HttpMetrics().snapshot())
    text = ledger.render()
    wanted = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 0.0'
    assert (wanted in text.splitlines()) == aliases
    assert ("vllm:" in text) == aliases
