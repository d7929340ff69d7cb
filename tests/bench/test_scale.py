"""`bench scale`: the arithmetic of large deployments, and what the rows are made of."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specserve.bench.load import Call
from specserve.bench.scale import SIDES, Options, configured, routing_row
from specserve.bench.scale_model import FULL, Constants, Sample, fitted, needed
from specserve.cli import main
from specserve.errors import ConfigError

PATIENT = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SHARES = st.floats(0, 0.3)


def sample(pipelines: int, truth: Constants) -> Sample:
    """What a machine with these constants would show."""
    events_s = pipelines * truth.events_s
    rest = {
        "proxy": 0.01,
        "pipeline": 0.02,
        "ingress": truth.rest + pipelines * truth.channel,
        "coordinator": truth.coordinator_rest,
    }
    work = {
        "proxy": events_s * truth.proxy_s,
        "pipeline": 0.0,
        "ingress": events_s * truth.ingress_s,
        "coordinator": truth.events_s * truth.coordinator_s,
    }
    return Sample(pipelines, events_s, rest, {side: rest[side] + work[side] for side in SIDES})


@PATIENT
@given(
    events_s=st.floats(10, 2000),
    each=st.tuples(st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3)),
    rest=st.tuples(SHARES, st.floats(1e-6, 0.05), SHARES),
)
def test_the_constants_of_a_machine_are_found_again(events_s, each, rest):
    """From runs on 1, 2 and 4 pipelines that obey the model, its constants come out."""
    truth = Constants(events_s, *each, *rest)
    found = fitted([sample(count, truth) for count in (1, 2, 4)])
    for name in Constants.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6, abs=1e-9), name


def test_needs_are_those_of_the_events_until_channels_fill_an_ingress():
    """By hand: 1,000 events/s a pipeline at 0.1 ms each, and channels that take a hundredth of a core each."""
    constants = Constants(1000, 0.0002, 0.0001, 0.00005, 0.01, channel=0.01, rest=0.0)
    one, thirty, hundred = needed(constants, (1, 30, 100))
    assert one["ingresses"] == 1.0
    assert thirty["ingresses"] == pytest.approx(30 * 0.1 / (FULL - 0.3))
    assert thirty["proxies"] == pytest.approx(30 * 0.2 / FULL)
    assert hundred["ingresses"] is None
    assert hundred["part"] == 10
    assert one["coordinator_core"] == hundred["coordinator_core"] == pytest.approx(0.06)


def test_one_run_puts_all_rest_on_its_channels():
    """Without a second size the two cannot be told apart; the worse is assumed."""
    truth = Constants(100, 1e-4, 1e-4, 1e-4, 0.0, channel=0.01, rest=0.02)
    found = fitted([sample(2, truth)])
    assert (found.channel, found.rest) == (pytest.approx(0.02), 0.0)


def test_a_row_tells_affinity_from_hits():
    """What the router remembers and what the pipelines report are two numbers; failures count in neither time."""
    calls = [Call(0.1, prompt=100, cached=50), Call(0.3, prompt=100), Call(None)]
    row = routing_row("prefix", calls, {"blocks": 40, "matched_blocks": 30})
    assert (row["matched_share"], row["cached_share"], row["failed"]) == (0.75, 0.25, 1)
    assert row["ttft_p50_ms"] == pytest.approx(100)
    assert row["ttft_p99_ms"] == pytest.approx(300)
    assert routing_row("prefix", [], {"blocks": 0, "matched_blocks": 0})["matched_share"] is None


def test_settings_of_a_run():
    """As many pipelines as asked for, and room for all their clients."""
    config = configured(Options(clients=100), 4, "round_robin")
    assert (config.cluster.pipelines, config.cluster.routing) == (4, "round_robin")
    assert config.engine.max_requests >= 100


@pytest.mark.parametrize("wrong", [{"routing": ("magic",)}, {"pipelines": (0,)}, {"seconds": 0}, {"prefix_tokens": 0}])
def test_what_cannot_be_run_is_refused(wrong):
    """Before any Ray is started."""
    with pytest.raises(ConfigError):
        Options(**wrong).check()


def test_the_command_refuses_in_words(capsys):
    """Exit status 1 and a line, no traceback."""
    assert main(["bench", "scale", "--routing", "magic"]) == 1
    assert "no routing called magic" in capsys.readouterr().err
