"""/metrics of a deployment with two HTTP processes: one truth whoever answers, and no counter that falls."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import httpx
import pytest
from deployment import WAIT_S, body, complete, healthy, pids, served, until
from scraped import Scrape

pytestmark = [pytest.mark.ray, pytest.mark.full]


@pytest.fixture(scope="module")
def url(config, ray_here):
    """Two ingress replicas; traffic mirrored into Ray's own metrics."""
    cluster = config.cluster.model_copy(update={"ingress_replicas": 2})
    observe = config.observe.model_copy(update={"ray_metrics": True})
    with served(config.model_copy(update={"cluster": cluster, "observe": observe})) as address:
        yield address


def scrape(url: str) -> Scrape:
    """A connection of its own for each scrape, so that the replicas take turns."""
    answer = httpx.get(f"{url}/metrics", timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return Scrape(answer.text)


def replicas() -> list[int]:
    """Process ids of the ingress replicas."""
    from specserve.cluster import processes

    return [one.pid for one in processes.descendants() if ":specserve:Ingress" in _title(one.pid)]


def _title(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def test_twenty_scrapes_never_fall_whatever_is_killed(url):
    """Under load, across a killed draft worker and a killed HTTP process; afterwards everything is accounted for."""
    until(lambda: scrape(url).sum("specserve_ingress_up") == 2)
    assert len(replicas()) == 2
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            try:
                httpx.post(f"{url}/v1/completions", json=body(), timeout=WAIT_S)
            except httpx.HTTPError:  # the killed replica's own streams are cut
                time.sleep(0.1)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    last = scrape(url)
    try:
        for number in range(20):
            if number == 6:
                os.kill(pids()["draft"], signal.SIGKILL)
            if number == 12:
                os.kill(replicas()[0], signal.SIGKILL)
                time.sleep(2)
            now = scrape_through(url)
            assert now.fell(last) == {}, number
            last = now
            time.sleep(0.2)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    until(lambda: healthy(url))
    end = scrape(url)
    assert end.fell(last) == {}
    assert end.sum("specserve_worker_restarts_total", role="draft") == 1
    assert end.sum("specserve_spec_decode_emitted_tokens_total") == end.sum("specserve_generation_tokens_total") > 0


def scrape_through(url: str) -> Scrape:
    """A scrape, while the proxy may still try a replica that was just killed."""
    for _ in range(20):
        try:
            return scrape(url)
        except (httpx.HTTPError, AssertionError):
            time.sleep(0.3)
    return scrape(url)


def test_bytes_between_the_processes_are_counted(url):
    """Plans, pushes, verifications and verdicts, there and back, beside the beats."""
    complete(url)
    found = scrape(url)
    for link, kind in (
        ("to_draft", "plan"),
        ("from_draft", "push"),
        ("to_target", "verify"),
        ("from_target", "verdict"),
    ):
        labels = {"link": link, "kind": kind}
        assert found.sum("specserve_network_messages_total", **labels) > 0
        assert found.sum("specserve_network_bytes_total", **labels) > 50
    assert found.sum("specserve_network_messages_total", link="to_ingress", kind="deltas") > 0
    assert found.sum("specserve_serialization_seconds_total") > 0
    assert found.sum("specserve_network_transfer_seconds_count") > 0


def test_ray_exports_the_same_metrics(url):
    """Under Ray's prefix, on the node's own port."""
    import ray

    (node,) = [node for node in ray.nodes() if node["Alive"]]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    until(lambda: "ray_specserve_generation_tokens_total" in httpx.get(address, timeout=WAIT_S).text)


def test_status_and_timeline_come_from_the_coordinator(url):
    """Both workers with their devices, and rounds of both on the timeline."""
    complete(url)
    status = httpx.get(f"{url}/status.json", timeout=WAIT_S).json()
    assert status["workers"].keys() == {"draft", "target"}
    assert all(worker["up"] and worker["device"] == "cpu" for worker in status["workers"].values())
    assert status["health"]["status"] == "ok"
    trace = httpx.get(f"{url}/timeline.json", timeout=WAIT_S).json()
    assert {event.get("cat") for event in trace["traceEvents"]} >= {"draft", "target"}
    assert len(json.dumps(trace)) > 1000
