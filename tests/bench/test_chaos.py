"""The chaos bench: what it counts as broken, and a short run on a real Ray."""

from __future__ import annotations

import json
import random
from itertools import islice, product

import pytest
from command import command

from specserve.bench import chaos
from specserve.bench.chaos import Options, held, recomputed
from specserve.bench.chaos_report import (
    Fault,
    LostDraft,
    Outcome,
    blame,
    broken,
    draft_kills,
    draft_kills_together,
    lost_draft,
    rows,
    summary,
)
from specserve.bench.watched import Ask, Seen
from specserve.errors import ConfigError
from specserve.timeline import chrome_trace
from specserve.types import DeviceSpan


def seen(end="finished", text="abc", began_s=0.0, ended_s=10.0, at=(), **fields) -> Seen:
    fields = {"finishes": int(end == "finished"), "errors": int(end == "failed")} | fields
    return Seen(began_s, list(at), text, end=end, ended_s=ended_s, **fields)


@pytest.mark.parametrize(
    ("stream", "wrong"),
    [
        (seen(), False),
        (seen(text="abd"), True),
        (seen(text="ab"), True),
        (seen("cut", "ab"), False),
        (seen("failed", "b"), True),
        (seen(finishes=2), True),
        (seen(finishes=1, errors=1), True),
    ],
)
def test_a_stream_is_wrong_when_it_says_something_else_or_ends_twice(stream, wrong):
    """Whole texts must be equal, those that were cut off must be how the text begins."""
    assert stream.wrong("abc") == wrong


def test_the_longest_gap_is_that_which_a_fault_lies_in():
    """Gaps before it began and after it was over say nothing about it."""
    stream = seen(at=[0.0, 5.0, 6.0, 9.0, 20.0])
    assert stream.longest_gap_s(5.5, 8.0) == 3.0
    assert stream.longest_gap_s(1.0, 2.0) == 5.0
    assert stream.longest_gap_s(30.0, 40.0) == 0.0


def test_failures_are_blamed_on_the_fault_before_them():
    """Streams may fail where an ingress was hurt, and nowhere else."""
    faults = [Fault("kill", "target", 1.0, 5.0), Fault("kill", "ingress", 6.0, 9.0)]
    innocent, excused, not_excused, early = (
        seen(),
        seen("cut", ended_s=7),
        seen("failed", ended_s=3),
        seen("cut", ended_s=0),
    )
    assert [blame(each, faults) for each in (innocent, excused, not_excused, early)] == [
        None,
        faults[1],
        faults[0],
        None,
    ]
    outcome = Outcome(faults)
    for each in (innocent, excused):
        outcome.note(each, "abc")
    assert broken(outcome) == []
    outcome.note(not_excused, "abc")
    assert "1 streams failed" in broken(outcome)[0]


def test_what_an_ingress_lost_is_blamed_on_it_however_late_clients_hear_of_it():
    """If they had asked by then; and nothing may fail where an ingress was only cut off from coordinators."""
    starved, cut = Fault("starve", "ingress", 1.0, 5.0), Fault("cut", "ingress", 10.0, 14.0)
    late, younger = seen("failed", began_s=4.0, ended_s=64.0), seen("failed", began_s=6.0, ended_s=64.0)
    assert blame(late, [starved, cut]) == starved
    assert blame(younger, [starved, cut]) == cut
    outcome = Outcome([starved, cut])
    outcome.note(late, "abc")
    assert broken(outcome) == []
    outcome.note(younger, "abc")
    assert "1 streams failed" in broken(outcome)[0]


def test_every_promise_that_was_not_kept_is_told():
    """Another text, no end, something held, no recovery."""
    outcome = Outcome([Fault("stop", "draft", 1.0, None)], left={"slots drafting": 3.0})
    outcome.note(seen(text="xyz"), "abc")
    outcome.note(seen("hung", "a"), "abc")
    told = " | ".join(broken(outcome))
    for words in ("another text", "never ended", "3 slots drafting", "stop draft"):
        assert words in told
    (row,) = rows(outcome)
    assert (row["recovered"], row["times"], row["hung"], row["recovery_p50_s"]) == (0, 1, 1, None)
    assert (summary(outcome)["wrong"], summary(outcome)["left"]) == (1, 3.0)


def test_what_is_held_is_read_off_the_metrics():
    """Free slots and free blocks are not held; zeros are not told."""
    text = """
specserve_num_requests_running{model="m"} 2.0
specserve_num_requests_waiting{model="m"} 0.0
specserve_slots{model="m",state="free"} 9.0
specserve_slots{model="m",state="verifying"} 1.0
specserve_kv_blocks{model="m",role="target",state="held"} 4.0
specserve_kv_blocks{model="m",role="target",state="free"} 5.0
"""
    assert sorted(held(text).values()) == [1.0, 2.0, 4.0]
    assert held("") == {}


def test_each_fault_comes_once_before_any_comes_again():
    """In an order of the seed's: a short run meets as many kinds as there is time for."""
    options = Options(kinds=("kill", "cut"), roles=("draft", "coordinator"))
    drawn = list(islice(chaos.cases(options, random.Random(3)), 8))
    assert drawn == list(islice(chaos.cases(options, random.Random(3)), 8))
    assert sorted(drawn[:4]) == sorted(drawn[4:]) == sorted(product(options.kinds, options.roles))


def test_what_was_computed_again_is_read_off_the_metrics_of_all_pipelines():
    """Their sum; prompts, whose beginnings may be cached, have no part in it."""
    text = """
specserve_recomputed_tokens_total{model_name="m",replica="a"} 30.0
specserve_recomputed_tokens_total{model_name="m",replica="b"} 4.0
specserve_prompt_tokens_total{model_name="m"} 900.0
specserve_prefill_tokens_total{model_name="m"} 100.0
"""
    assert recomputed(text) == 34
    assert recomputed("") == 0


def test_each_kill_of_a_draft_worker_is_held_against_a_plain_round_and_100_ms():
    """The longest gap of two seconds counts, whenever it begins; later ones are told; other faults have no such row.

    Beside it stand the gap in which the kill lies, and the longest that was over before it.
    """
    faults = [Fault("kill", "draft", 2.0, 6.0), Fault("kill", "draft", 12.0, 13.0), Fault("kill", "target", 20.0, 21.0)]
    outcome = Outcome([*faults, Fault("stop", "draft", 22.0, 23.0)], plain_step_s=0.05)
    outcome.note(seen(at=[1.0, 1.03, 1.95, *(2.06 + 0.1 * number for number in range(21)), 5.0], ended_s=8.0), "abc")
    outcome.note(seen(began_s=11.0, at=[11.9, 12.04, 12.5], ended_s=14.0), "abc")
    outcome.note(seen(began_s=15.0, at=[15.0, 19.0], ended_s=19.0), "abc")
    first, second = draft_kills(outcome)
    assert (first["streams"], second["streams"]) == (1, 1)
    assert first["gap_s"] == pytest.approx(0.11)
    assert first["stall_s"] == pytest.approx(0.94)
    assert first["bar_s"] == second["bar_s"] == pytest.approx(0.15)
    assert (first["within"], second["within"]) == ("yes", "NO")
    assert second["gap_s"] == second["stall_s"] == pytest.approx(0.46)
    assert (first["recovery_s"], second["recovery_s"]) == (4.0, 1.0)
    assert (first["before_s"], first["next_s"]) == (pytest.approx(0.92), pytest.approx(0.11))
    assert (second["before_s"], second["next_s"]) == (0.0, pytest.approx(0.14))


def test_all_kills_of_draft_workers_are_told_together():
    """The median and the longest of each time, and how many kept the bar; nothing where none was killed."""
    faults = [Fault("kill", "draft", float(at), at + 2.5, LostDraft(0.2, 0.1)) for at in (10, 20, 30)]
    outcome = Outcome(faults, plain_step_s=0.05)
    outcome.note(seen(at=[9.95, 10.1, 19.95, 20.05, 29.99, 30.4], ended_s=40.0), "abc")
    told = {row["time"]: row for row in draft_kills_together(outcome)}
    assert (told["next"]["p50_s"], told["next"]["max_s"]) == (pytest.approx(0.15), pytest.approx(0.41))
    assert (told["rounds"]["kills"], told["rounds"]["within"], told["gap"]["within"]) == (3, 3, 0)
    assert told["rounds"]["bar_s"] == pytest.approx(0.15)
    assert told["rounds_before"]["bar_s"] is None
    assert draft_kills_together(Outcome([Fault("kill", "target", 1.0, 2.0)])) == []


def test_rounds_around_a_lost_draft_worker_are_read_off_the_timeline():
    """The last second without drafts is its absence; rounds count by their ends, two seconds before it and after."""
    rounds = [0.0, 0.5, 1.9, 2.0, 2.1, 2.4, 4.3, 9.0, 9.1]
    drafts = [(-9.0, -8.9), (0.3, 0.4), (1.2, 2.2), (8.9, 9.0)]
    spans = [DeviceSpan("target", n, at - 0.01, at, 0.005, 1, 5) for n, at in enumerate(rounds)]
    spans += [DeviceSpan("draft", n, at, end, 0.005, 1, 5) for n, (at, end) in enumerate(drafts)]
    found = lost_draft(chrome_trace(spans, "m"))
    assert found is not None
    assert found.before_s == pytest.approx(1.4)
    assert found.after_s == pytest.approx(1.9)
    assert lost_draft(chrome_trace(spans[:-1], "m")) != found
    assert lost_draft(chrome_trace(spans[:9], "m")) is None


def test_asks_have_one_text_each():
    """Greedy, or with a seed under `coupled`: all differ, and each is determined."""
    asks = Ask.all_of("m", 5)
    assert len({json.dumps(ask.body, sort_keys=True) for ask in asks}) == 16
    for ask in asks:
        assert ask.body["temperature"] == 0 or ask.body["speculation"]["rule"] == "coupled"
        assert isinstance(ask.body["seed"], int)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"kinds": ("burn",)}, "--kinds"),
        ({"roles": ()}, "--roles"),
        ({"clients": 0}, "--clients"),
        ({"faults": 0}, "--faults"),
        ({"hold_s": 0}, "--hold"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(wrong, told):
    """In words, by the option's name."""
    with pytest.raises(ConfigError, match=told):
        chaos.measure(Options(**wrong), print)


@pytest.mark.ray
@pytest.mark.full
def test_a_short_run_on_a_real_ray_keeps_every_promise(tmp_path):
    """Workers are killed under open streams: exit 0, each stream ended once and with its text, and nothing is held."""
    report = tmp_path / "chaos.json"
    arguments = ["--clients", "4", "--seconds", "2", "--seed", "1", "--max-tokens", "60"]
    only = ["--kinds", "kill", "--roles", "draft,target", "--json", str(report)]
    done = command("bench", "chaos", *arguments, *only)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(report.read_text())
    whole = written["config"]["whole"]
    assert whole["faults"] >= 1
    assert whole["streams"] == whole["finished"] > 4
    assert whole["hung"] == whole["wrong"] == whole["left"] == 0
    kills = {row["role"]: row["times"] for row in written["rows"]}
    assert (whole["recomputed"] > 0) == ("target" in kills)
    assert len(written["config"]["draft_kills"]) == kills.get("draft", 0)
    assert all(row["recovered"] == row["times"] and row["failed"] == 0 for row in written["rows"])
    assert "the whole run" in done.stdout


@pytest.mark.ray
@pytest.mark.full
def test_all_faults_on_all_processes():
    """A minute of everything: streams of a hurt ingress may fail, and no promise is broken."""
    done = command("bench", "chaos", "--clients", "8", "--seconds", "60", "--seed", "2", "--max-tokens", "200")
    assert done.returncode == 0, done.stdout + done.stderr
