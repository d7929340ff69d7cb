"""One of two HTTP processes is killed, or stopped: its requests are released, and nobody else notices."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import pytest
from deployment import WAIT_S, pids, served, until
from open_streams import Answer, ask
from scraped import Scrape

from specserve import config as configs
from specserve.bench.chaos import held
from specserve.bench.faults import titled
from specserve.cluster.launch import running_ingresses
from specserve.models import _device_profile

pytestmark = [pytest.mark.ray, pytest.mark.full]

TITLE = "ServeReplica:specserve:Ingress"
CLIENTS = 8
TOKENS = 1500
"""An answer then takes a quarter of a minute, however fast the machine is: the devices are emulated."""


@pytest.fixture(scope="module")
def config() -> configs.Config:
    """Two HTTP processes in front of one pipeline."""
    settings = _device_profile.settings("qwen3-32b-0.6b-h100") | {"server.port": 0, "cluster.ingress_replicas": 2}
    return configs.parse(configs.override({}, settings))


@pytest.fixture(scope="module")
def url(config, ray_here):
    with served(config) as address:
        yield address


def metrics(url: str) -> str:
    """From whichever process still answers."""
    for _ in range(20):
        try:
            return httpx.get(f"{url}/metrics", timeout=WAIT_S, headers={"connection": "close"}).raise_for_status().text
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError("no process answers")


def running(url: str) -> float:
    """Requests that the coordinator holds a place for."""
    return Scrape(metrics(url)).sum("specserve_num_requests_running")


def asked_for(url: str, config: configs.Config) -> tuple[list[Answer], list[threading.Thread]]:
    """Streams of all clients, each of which has begun."""
    answers = [Answer() for _ in range(CLIENTS)]
    asked = {"model": config.served_name, "prompt": "Once", "max_tokens": TOKENS, "stream_options": None}
    threads = [threading.Thread(target=ask, args=(url, asked, answer)) for answer in answers]
    for thread in threads:
        thread.start()
    until(lambda: all(answer.began.is_set() for answer in answers) and running(url) == CLIENTS)
    return answers, threads


def test_what_a_killed_ingress_brought_is_released(url, config, record_property):
    """Long before it would have ended; the other's streams go on to their one text, and at the end nothing is held."""
    answers, threads = asked_for(url, config)
    os.kill(titled(TITLE)[0], signal.SIGKILL)
    killed_s = time.monotonic()
    until(lambda: any(answer.errors for answer in answers))
    until(lambda: running(url) == sum(not answer.errors for answer in answers))
    record_property("released_s", time.monotonic() - killed_s)
    assert not any(answer.done for answer in answers), "answers that end by themselves release nothing"
    cut = [answer for answer in answers if answer.errors]
    others = [answer for answer in answers if not answer.errors]
    assert cut
    assert others
    for thread in threads:
        thread.join()
    (text,) = {answer.texts[0] for answer in others}
    assert all(answer.done == 1 for answer in others)
    assert all(not answer.done and text.startswith(answer.texts[0]) for answer in cut)
    until(lambda: held(metrics(url)) == {})


def test_a_stopped_ingress_is_replaced(url, config):
    """It answers nobody: Serve finds it stuck and another one serves beside it. When it goes on after all, it is ended.

    Its streams are held up, with the calls that it holds at the pipeline, which has no part in this; then they go on.
    """
    before = pids()
    answers, threads = asked_for(url, config)
    ingresses = titled(TITLE)
    os.kill(ingresses[0], signal.SIGSTOP)
    try:
        until(lambda: bool(set(titled(TITLE)) - set(ingresses)) and running_ingresses() == len(ingresses))
        assert pids() == before
    finally:
        os.kill(ingresses[0], signal.SIGCONT)
    for thread in threads:
        thread.join()
    assert [answer.errors for answer in answers] == [[]] * CLIENTS
    assert len({answer.texts[0] for answer in answers}) == 1
    until(lambda: ingresses[0] not in titled(TITLE))
    assert len(titled(TITLE)) == len(ingresses)
    answer = Answer()
    ask(url, {"model": config.served_name, "prompt": "Once", "max_tokens": 8, "stream_options": None}, answer)
    assert not answer.errors
    assert answer.done == 1
