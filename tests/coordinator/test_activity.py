"""Every second of every worker has one name."""

from __future__ import annotations

import re

import pytest

from specserve.coordinator.activity import Activity
from specserve.metrics import EngineMetrics


class Scene:
    """An activity on a clock that the test moves."""

    def __init__(self, *roles: str) -> None:
        self.now = 0.0
        self.metrics = EngineMetrics("m", clock=lambda: self.now)
        self.activity = Activity(self.metrics, lambda: self.now)
        for role in roles:
            self.activity.joined(role)

    def after(self, seconds: float) -> Activity:
        self.now += seconds
        return self.activity

    def booked(self, role: str) -> dict[str, float]:
        """Seconds by what they went into, without zeros."""
        self.activity.book()
        pattern = rf'specserve_worker_(?:busy|wait)_seconds_total{{.*role="{role}".*}}'
        lines = [line for line in self.metrics.render().splitlines() if re.match(pattern, line)]
        found = {re.search('(?:phase|reason)="(.*?)"', line)[1]: float(line.split()[-1]) for line in lines}
        return {name: pytest.approx(value) for name, value in found.items() if value}

    def overlap(self) -> float:
        self.activity.book()
        (line,) = [x for x in self.metrics.render().splitlines() if x.startswith("specserve_overlap_seconds_total")]
        return float(line.split()[-1])


def test_a_round_with_a_draft_is_booked_to_the_second():
    """Idle, drafting, verifying, and the coordinator's own turns in between: nothing is left out or counted twice."""
    scene = Scene("draft", "target")
    scene.after(5).idle(False)
    scene.after(1).sent("draft", 1, 1, 4)
    scene.after(3).returned("draft", {"draft": 2})
    scene.after(1).sent("target", 1, 1, 5)
    scene.after(6).returned("target", {"forward": 4, "sampling": 1})
    scene.after(2).idle(True)
    scene.after(4).settle()
    assert scene.booked("draft") == {"idle": 9, "coordinator": 4, "draft": 2, "wire": 1, "peer": 6}
    assert scene.booked("target") == {"idle": 9, "coordinator": 4, "peer": 3, "forward": 4, "sampling": 1, "wire": 1}


def test_overlap_is_the_time_that_both_compute():
    """Computing lies in the middle of each round trip: draft from 1 to 5 and target from 3 to 9 share two seconds."""
    scene = Scene("draft", "target")
    scene.activity.idle(False)
    scene.activity.sent("draft", 1, 1, 4)
    scene.after(2).sent("target", 1, 1, 5)
    scene.after(4).returned("draft", {"draft": 4})
    assert scene.overlap() == 0
    scene.after(4).returned("target", {"forward": 6})
    assert scene.overlap() == pytest.approx(2)
    assert [(span.began_s, span.ended_s) for span in scene.activity.spans] == [(1, 5), (3, 9)]


def test_taking_turns_is_no_overlap():
    """Draft, then verify: the tracks are never full at once."""
    scene = Scene("draft", "target")
    scene.activity.idle(False)
    for number in range(3):
        scene.after(0).sent("draft", number, 1, 4)
        scene.after(1).returned("draft", {"draft": 1})
        scene.after(0).sent("target", number, 1, 5)
        scene.after(1).returned("target", {"forward": 1})
    assert scene.overlap() == 0


def test_a_lost_worker_is_away_with_what_it_was_computing():
    """From the sending on its time is lost, until another one joins."""
    scene = Scene("draft", "target")
    scene.activity.idle(False)
    scene.activity.sent("draft", 1, 1, 4)
    scene.after(2).left("draft")
    scene.after(3).joined("draft")
    scene.after(1).settle()
    assert scene.booked("draft") == {"away": 5, "coordinator": 1}


def test_without_a_draft_worker_nothing_is_booked_for_it():
    """Model-free speculation has one worker."""
    scene = Scene("target")
    scene.after(3).settle()
    assert scene.booked("draft") == {}
    assert scene.booked("target") == {"idle": 3}
