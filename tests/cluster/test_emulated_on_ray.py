"""An emulated pair on real Ray: the same text as in one process, in no less time than the devices take."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from deployment import served, until

from specserve import config as configs
from specserve.bench import chaos, chaos_report
from specserve.bench.steady import Ask, Server
from specserve.local import LocalEngine
from specserve.models import _device_profile

pytestmark = pytest.mark.ray

PROFILE = "llama-8b-1b-h100"
PROMPT = "One prompt, two answers"


@pytest.fixture(scope="module")
def config():
    settings = _device_profile.settings(PROFILE) | {"server.port": 0, "engine.depth": 3}
    return configs.parse(configs.override({}, settings))


@pytest.fixture(scope="module")
def url(config, ray_here):
    with served(config) as address:
        yield address


def test_the_endpoint_answers_with_the_text_of_the_local_engine(config, url):
    """Greedy, with drafts: actors, sockets and HTTP change nothing."""
    with LocalEngine(config) as engine:
        (expected,) = engine.generate([PROMPT], max_tokens=24)
    body = {"model": config.served_name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}

    def kept_any() -> bool:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["text"] == expected.text
        return answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0

    until(kept_any)  # the target waits for no draft, and on a busy machine all of an answer's may be late


@pytest.mark.parametrize("depth", [0, 3])
def test_a_window_of_steady_state_holds_whole_rounds_that_take_the_devices_time(url, depth):
    """Two requests at once: the target was busy for at least its steps, and the requests are gone afterwards."""
    server = Server(url, f"emulated-{PROFILE}", longest=4096)
    counted = server.measure(Ask(2, 0.0, depth), 0.6)
    device = _device_profile.load(PROFILE).target
    rounds = counted.steps / 2
    assert rounds > 5
    assert counted.target_s >= (rounds - 1) * device.step_s(2, 2)
    assert counted.wall_s >= counted.target_s
    assert (counted.draft_steps > 0) == (depth > 0)  # what is drafted may be late on a busy machine
    assert counted.kept <= counted.drafted <= counted.steps * depth


def test_processes_killed_under_open_streams_break_no_promise(config, url):
    """By the chaos bench: each stream ended once and with its text, processes came back, and nothing is held."""
    roles = ("draft", "target", "coordinator")
    options = chaos.Options(
        clients=4, seconds=0.1, faults=3, seed=1, max_tokens=80, pause_s=0.5, kinds=("kill",), roles=roles
    )
    outcome = asyncio.run(chaos.disturb(url, config, options, lambda _: None))
    whole = chaos_report.summary(outcome)
    assert chaos_report.broken(outcome) == []
    assert whole["faults"] == 3
    assert whole["streams"] == whole["finished"] >= 4
    rows = chaos_report.rows(outcome)
    assert {row["role"]: row["recovered"] for row in rows} == dict.fromkeys(roles, 1)
    assert (whole["recomputed"] > 0) == any(row["role"] == "target" for row in rows)
    assert all(row["bar_s"] > 0.1 for row in chaos_report.draft_kills(outcome))
