"""Several pipelines: what they share, what an update of settings restarts, and a Ray of four nodes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from specserve import config as configs
from specserve.cluster import fleet
from specserve.cluster.deploy import _of_drafts, _of_ledger, _of_pipelines, _pipeline_count, _without_counts
from specserve.cluster.draft_keeper import kinship
from specserve.cluster.fleet import Fleet
from specserve.cluster.local_ray import logical_cpus
from specserve.cluster.scaling import LOAD, by_load
from specserve.errors import ConfigError

_PROGRAM = Path(__file__).with_name("many_nodes.py")
_LONGEST_S = 1500


def parsed(**cluster: object) -> configs.Config:
    return configs.parse({"cluster": cluster})


def facts(*steps: str) -> dict:
    """What happened on several nodes; see `many_nodes`."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    paths = os.pathsep.join([str(_PROGRAM.parents[2]), str(_PROGRAM.parent)])
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), *steps],
        env=os.environ | token | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def grown() -> dict:
    """Two pipelines on a Ray of three nodes: an update, then a third pipeline and a fourth node."""
    return facts("update", "scale_up")


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.timeout(_LONGEST_S + 60)
def test_an_update_under_sixteen_streams_breaks_none(grown):
    """Both pipelines were replaced; every stream ended in good order with the text that it has on an idle server."""
    assert len(set(grown["expected"])) > 1
    update = grown["update"]
    assert update["replaced"] == 2
    assert (update["wrong"], update["failures"]) == (0, [])
    assert update["finished"] >= 48


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.timeout(_LONGEST_S + 60)
def test_a_node_that_is_added_takes_the_pipeline_that_had_no_room(grown):
    """Two serve before, three after, the first two are the same, and no stream noticed."""
    up = grown["scale_up"]
    assert (up["without_room"], up["kept"], up["nodes"]) == (2, True, 4)
    assert (up["wrong"], up["failures"]) == (0, [])


@pytest.fixture(scope="module")
def shrunk() -> dict:
    """Two pipelines on nodes of their own, one of which is killed; then another node joins."""
    return facts("lose_node", "replace_node")


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.timeout(_LONGEST_S + 60)
def test_the_loss_of_a_node_fails_no_stream(shrunk):
    """Streams of the pipeline on it went on in the other, each with the text that it has on an idle server."""
    lost = shrunk["lose_node"]
    assert (lost["wrong"], lost["failures"]) == (0, [])
    assert lost["finished"] >= 80
    assert lost["resumed"] > 0
    assert lost["serving"] == 1


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.timeout(_LONGEST_S + 60)
def test_a_new_node_takes_the_lost_ones_place(shrunk):
    """Both pipelines serve again, and no stream noticed."""
    assert (shrunk["replace_node"]["wrong"], shrunk["replace_node"]["failures"]) == (0, [])


def test_counts_and_limits_of_http_restart_no_pipeline():
    """What pipelines are given stays the same when only counts, routing or HTTP change."""
    before = configs.parse({})
    changed = {"cluster": {"pipelines": 3, "routing": "round_robin", "ingress_replicas": 2}, "server": {"max_n": 3}}
    after = configs.parse(changed)
    assert _of_pipelines(before) == _of_pipelines(after)
    assert _without_counts(before) != _without_counts(after)
    assert _without_counts(before) == _without_counts(parsed(pipelines=3, max_pipelines=4, scale_up_after_s=1))
    assert _of_pipelines(before) != _of_pipelines(configs.parse({"engine": {"depth": 2}}))
    assert configs.parse(_of_pipelines(after)).engine == after.engine
    assert _of_ledger(before) == _of_ledger(configs.parse(changed | {"engine": {"depth": 2}}))


def test_counts_restart_no_shared_draft_worker():
    """Nor do HTTP and routing. Pipelines and draft workers of different models or limits are strangers."""
    before = parsed(pipelines=2, pipelines_per_draft=2)
    more = configs.parse({"cluster": {"pipelines": 4, "pipelines_per_draft": 2}, "server": {"max_n": 3}})
    assert _of_drafts(before) == _of_drafts(more)
    given = [configs.parse(tree) for tree in (_of_drafts(before), _of_pipelines(before), _of_pipelines(more))]
    assert {kinship(each) for each in given} == {kinship(before)}
    for other in ({"engine": {"depth": 2}}, {"draft": {"model": {"kv_blocks": 9}}}, {"target": {"source": "x"}}):
        tree = configs.parse({"cluster": {"pipelines": 2, "pipelines_per_draft": 2}} | other)
        assert kinship(tree) != kinship(before)
        assert _of_drafts(tree) != _of_drafts(before)


def test_the_number_of_pipelines():
    """Fixed without a limit to scale to; else between the two, at the load of one engine unless told otherwise."""
    assert _pipeline_count(parsed(pipelines=2)) == {"num_replicas": 2}
    scaled = _pipeline_count(parsed(pipelines=2, max_pipelines=5, scale_up_after_s=3))["autoscaling_config"]
    assert (scaled.min_replicas, scaled.max_replicas, scaled.upscale_delay_s) == (2, 5, 3)
    assert scaled.target_ongoing_requests == configs.parse({}).engine.max_requests
    with pytest.raises(ConfigError, match="max_pipelines 1 is below pipelines 2"):
        parsed(pipelines=2, max_pipelines=1)


class Context:
    """What Serve tells a policy."""

    target_num_replicas = 2

    def __init__(self, loads: dict[str, float] | None) -> None:
        self.aggregated_metrics = None if loads is None else {LOAD: loads}
        self.config = configs.parse({}).cluster.model_copy(update={"target_ongoing_requests": 10})


def test_pipelines_are_scaled_by_the_sequences_of_their_engines():
    """45 sequences at 10 a pipeline ask for 4.5; before anybody reported, for what there is."""
    assert by_load(Context({"a": 40, "b": 5}))[0] == 4.5
    assert by_load(Context({"a": 0, "b": 0}))[0] == 0
    assert by_load(Context(None))[0] == by_load(Context({}))[0] == 2


class Replica:
    """A handle to one replica, whose only method says which."""

    def __init__(self, name: str) -> None:
        self.name = self
        self.remote = lambda: name


class Handle:
    """As much of Serve's handle as names need."""

    app_name, deployment_name = "some-app", "Pipeline"

    def options(self, session_id: str) -> Replica:
        """The session is the name."""
        return Replica(session_id)


def test_a_fleet_knows_what_its_own_deployment_was_told():
    """The newest news counts, other deployments' do not, and calls are addressed by session."""
    there = Fleet(Handle())
    assert there.names() == ()
    fleet.told("some-app", "Pipeline", ["b", "a"])
    fleet.told("other-app", "Pipeline", ["c"])
    assert there.names() == ("a", "b")
    fleet.told("some-app", "Pipeline", ["b"])
    assert there.names() == ("b",)
    assert there.at("b").name.remote() == "b"


def test_a_small_machine_counts_as_many_processors_as_its_pipelines_ask_for():
    """Two and a half for each pipeline and a half for each ingress, or what the machine has."""
    assert logical_cpus(2, 40) == 101
    assert logical_cpus() >= 3
