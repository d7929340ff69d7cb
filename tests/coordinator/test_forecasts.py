"""What rounds with drafts cost beyond what is believed, and what the draft takes to read prompts."""

from __future__ import annotations

import pytest

from specserve.coordinator.forecasts import Forecasts
from specserve.coordinator.prompt_reading import PromptReading


def test_drafts_that_are_dearer_than_believed_show_and_a_pace_does_not():
    """All take twice as long: nothing is off. Those with drafts take a fifth more beside: it is."""
    forecasts = Forecasts()
    for _ in range(200):
        for drafted in (True, False):
            forecasts.observe(drafted, 0.040, 0.020)
    assert forecasts.drafted_over_plain == pytest.approx(1.0)
    for _ in range(200):
        forecasts.observe(True, 0.048, 0.020)
    assert forecasts.drafted_over_plain == pytest.approx(1.2, rel=0.01)


def test_a_few_rounds_say_little_and_one_that_hangs_counts_as_three():
    """Of eight rounds and more that were as expected before."""
    forecasts = Forecasts()
    for _ in range(2):
        forecasts.observe(True, 5.0, 0.020)
    assert 1.2 < forecasts.drafted_over_plain < 1.5


def test_the_share_of_reading_is_what_a_token_takes_by_how_many_come():
    """Ten rounds of 50 ms with 40 tokens of prompts each, of which each takes the draft 0.1 ms: 4 in 50."""
    reading = PromptReading()
    for _ in range(10):
        reading.observe(0.050, 40)
        reading.observe_draft(0.004, 40)
    assert reading.share == pytest.approx(0.08, rel=0.01)
    for _ in range(2000):
        reading.observe(0.050, 0)
    assert reading.share < 0.001


def test_what_reading_took_in_a_bad_hour_does_not_last():
    """A tenth of what it was after some thousand rounds without drafts, though as many prompts come."""
    reading = PromptReading()
    for _ in range(10):
        reading.observe(0.050, 40)
        reading.observe_draft(0.020, 40)
    before = reading.share
    for _ in range(1200):
        reading.observe(0.050, 40)
    assert before == pytest.approx(0.4, rel=0.01)
    assert reading.share < 0.1 * before


def test_nothing_is_held_of_reading_before_enough_was_read():
    """One long first round is no share."""
    reading = PromptReading()
    reading.observe(0.050, 40)
    reading.observe_draft(0.030, 40)
    assert reading.share == 0.0
