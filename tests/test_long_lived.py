"""Processes that live long: what Python's collector looks through, and when."""

from __future__ import annotations

import gc

import pytest

from specserve.long_lived import leave_alone


@pytest.fixture
def collector():
    """What is set for the collector stays as it was before."""
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def passes():
    return sum(generation["collections"] for generation in gc.get_stats())


def makes_and_drops(rounds, objects):
    for _ in range(rounds):
        made = [[] for _ in range(objects)]
        del made


def test_the_collector_does_not_run_for_what_rounds_make_and_drop(collector):
    """Fifty rounds of 5,000 objects each; Python as it starts looks several times in each of them."""
    gc.set_threshold(700)
    before = passes()
    makes_and_drops(50, 5000)
    assert passes() > before + 50
    leave_alone()
    before = passes()
    makes_and_drops(50, 5000)
    assert passes() == before


def test_what_piles_up_is_collected_all_the_same(collector):
    """Objects that hold each other and that nobody else holds go, though never all at once."""
    leave_alone()
    before = passes()
    for _ in range(50_000):
        ring = []
        ring.append(ring)
    assert passes() > before
    assert sum(isinstance(each, list) and len(each) == 1 and each[0] is each for each in gc.get_objects()) < 20_000
