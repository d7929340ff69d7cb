"""What Serve knows of the requests of pipelines: its own count of calls, and what it waits for when one leaves."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import many_nodes
import pytest
from many_nodes import STREAMS, WAIT_S, deploy, settings, slow_profile, streamed, until
from scraped import Scrape

from specserve.config import Config

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> str:
    """Of slow devices."""
    return slow_profile(str(tmp_path_factory.mktemp("profile")))


def configured(profile: str, pipelines: int) -> Config:
    """So many pipelines behind one HTTP process, with room for all that is asked here."""
    from specserve.cluster import launch

    asked = settings(profile)
    cluster = asked.cluster.model_copy(update={"ingress_replicas": 1, "pipelines": pipelines})
    engine = asked.engine.model_copy(update={"max_requests": 64})
    return launch.with_port(asked.model_copy(update={"cluster": cluster, "engine": engine}))


@contextmanager
def deployed(config: Config) -> Iterator[str]:
    """The server, with all its pipelines taking requests."""
    from specserve.cluster import launch

    with launch.deployed(config, threading.Event()) as up:
        assert up
        address = f"http://127.0.0.1:{config.server.port}"
        until(lambda: len(statuses(address)) == config.cluster.pipelines, "all pipelines serve")
        yield address


def statuses(url: str) -> list[str]:
    """Of the pipelines that the ingress knows and that are well."""
    listed = httpx.get(f"{url}/status.json", timeout=WAIT_S).json().get("pipelines", [])
    return [one["name"] for one in listed if one["status"] == "ok"]


def ongoing() -> dict[str, int]:
    """Serve's count of ongoing requests, by replica of the pipelines' deployment."""
    import ray
    from ray.exceptions import RayActorError

    named = ray.util.list_named_actors(all_namespaces=True)
    replicas = [one["name"] for one in named if one["name"].startswith("SERVE_REPLICA::specserve#Pipeline#")]
    counts = {}
    for name in replicas:
        with contextlib.suppress(ValueError, RayActorError):  # it has gone since it was listed
            replica: Any = ray.get_actor(name, namespace="serve")
            counts[name.rpartition("#")[2]] = ray.get(replica.get_num_ongoing_requests.remote())
    return counts


def opened(stack: ExitStack, url: str, **fields: object) -> None:
    """A stream that has begun, and is open until the stack is closed or it has ended."""
    body = {"prompt": "Say much", "max_tokens": 1500, "temperature": 0, "stream": True, "ignore_eos": True} | fields
    reply = stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S))
    assert reply.status_code == 200


def counts(number: int) -> None:
    """Wait until Serve counts so many."""
    until(lambda: sum(ongoing().values()) == number, f"Serve counts {number}, not {ongoing()}")


@pytest.mark.parametrize(("pairs", "singles"), [(2, 6), pytest.param(10, 40, marks=pytest.mark.full)])
def test_serve_counts_each_open_sequence_and_nothing_is_held_up(profile, ray_here, pairs, singles):
    """Some are open, a third of them as pairs of one request: Serve counts each, and whoever asks is answered."""
    sequences = 2 * pairs + singles
    with deployed(configured(profile, 1)) as url, ExitStack() as alone:
        with ExitStack() as twins:
            for _ in range(pairs):
                opened(twins, url, n=2, temperature=1)
            for _ in range(singles):
                opened(alone, url)
            counts(sequences)
            assert httpx.get(f"{url}/health", timeout=WAIT_S).json()["status"] == "ok"
            assert len(statuses(url)) == 1
            found = Scrape(httpx.get(f"{url}/metrics", timeout=WAIT_S).text)
            assert found.sum("specserve_num_requests_running") == sequences
            counts(sequences)
        counts(singles)
        alone.close()
        counts(0)


def asked(url: str, model: str) -> tuple[list[threading.Thread], dict[int, tuple[str, str | None]]]:
    """Sixteen streams, and where their texts and failures will be."""
    answers: dict[int, tuple[str, str | None]] = {}

    def ask(number: int) -> None:
        answers[number] = streamed(url, model, number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    return threads, answers


@pytest.mark.full
def test_a_pipeline_that_scaling_takes_away_ends_its_streams_first(profile, ray_here, monkeypatch):
    """Serve counts on for the one that leaves until its streams have ended, all of them whole; then it is gone."""
    monkeypatch.setattr(many_nodes, "TOKENS", 600)
    config = configured(profile, 2)
    with deployed(config) as url:
        health = httpx.get(f"{url}/health", timeout=WAIT_S).json()
        assert (health["status"], "of 2" in json.dumps(health)) == ("ok", False)
        threads, expected = asked(url, config.served_name)
        for thread in threads:
            thread.join()
        assert not any(failure for _, failure in expected.values())
        threads, answers = asked(url, config.served_name)
        before = set(ongoing())
        until(lambda: sum(ongoing().values()) == STREAMS and all(ongoing().values()), "both work")
        deploy(config.model_copy(update={"cluster": config.cluster.model_copy(update={"pipelines": 1})}))
        until(lambda: len(statuses(url)) == 1, "one leaves")
        (left,) = before - set(statuses(url))
        assert ongoing().get(left), "it was cut, or its streams were over before it left"
        for thread in threads:
            thread.join()
        assert answers == expected
        until(lambda: set(ongoing()) == before - {left}, "it is gone")
