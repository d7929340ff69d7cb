"""A whole deployment on a local Ray: HTTP in front, three processes behind, and what happens when they are killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from ipaddress import ip_address

import httpx
import psutil
import pytest
from cluster_facts import PROMPT, TOKENS
from deployment import WAIT_S, body, complete, drafted, healthy, kill_mid_stream, pids, served, stream, until
from open_streams import KINDS, Answer, ask, idle, streams
from priorities import niceness, threads_of
from scraped import Scrape

from specserve.bench.faults import titled
from specserve.cluster.processes import descendants
from specserve.errors import ConfigError

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def url(config, ray_here) -> Iterator[str]:
    """The deployment with the socket transport, with room for twenty long answers."""
    target = config.target.model_copy(update={"kv_blocks": 1200})
    draft = config.draft.model_copy(update={"model": config.draft.model.model_copy(update={"kv_blocks": 1200})})
    with served(config.model_copy(update={"target": target, "draft": draft})) as address:
        yield address


def test_chat_over_http(url):
    """A chat request is answered, with usage and at the asked length, under one id; the client's own is no text."""
    message = {"role": "user", "content": "Hello"}
    asked = {"model": "tiny", "messages": [message], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=WAIT_S, headers={"x-request-id": b"\xff"})
    answer = reply.json()
    assert len(reply.headers.get_list("x-request-id")) == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12


def test_the_parts_are_different_processes(url):
    """Supervisor, coordinator, target and draft run in four processes, none of them this one."""
    found = pids()
    assert found.keys() == {"pipeline", "coordinator", "target", "draft"}
    assert len({os.getpid(), *found.values()}) == 5


def test_text_is_that_of_the_local_engine(url, expected_text):
    """Over sockets the greedy answer is that of one process, and drafts were used and kept."""
    answer = complete(url)
    assert answer["choices"][0]["text"] == expected_text
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > TOKENS / 2


def test_nothing_listens_beyond_this_machine(url):
    """Ray's ports run what they are sent, so on a local Ray every process keeps to loopback: Serve's replicas, too."""
    mine = {process.pid for process in descendants()}
    listening = [each for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    listening = [each for each in listening if each.pid in mine]
    assert len(listening) > 5
    assert len(titled("ServeReplica")) >= 3
    open_to_others = [each for each in listening if not ip_address(each.laddr.ip.removeprefix("::ffff:")).is_loopback]
    assert open_to_others == []


def test_structured_answers_across_processes(url):
    """The specification reaches both workers over the wire; a wrong one is refused by the ingress alone."""
    asked = body(structured_outputs={"regex": "(yes|no){3}!"}, ignore_eos=False)
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=WAIT_S).json()
    assert re.fullmatch("(yes|no){3}!", answer["choices"][0]["text"])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert drafted(answer) > 0
    refused = httpx.post(f"{url}/v1/completions", json=body(structured_outputs={"regex": "(a"}), timeout=WAIT_S)
    assert refused.status_code == 400
    both = httpx.post(f"{url}/v1/completions", json=asked | {"ignore_eos": True}, timeout=WAIT_S)
    assert (both.status_code, both.json()["error"]["code"]) == (400, "invalid_value")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
@pytest.mark.parametrize("role", ["target", "draft"])
def test_what_computes_answers_has_ordinary_priority(url, role):
    """Threads that libraries made for the start may be left, and do nothing."""
    complete(url)
    pid = pids()[role]
    before = threads_of(pid)
    for _ in range(4):
        complete(url)
    computed = {name: (nice, took - before.get(name, (0, 0))[1]) for name, (nice, took) in threads_of(pid).items()}
    in_all = sum(took for _, took in computed.values())
    assert in_all > 0
    assert {nice for nice, took in computed.values() if took > in_all / 100} == {niceness()}


def test_many_at_once(url, expected_text):
    """Sixteen concurrent streams end with the same answer each."""
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(stream(url, lambda: None)[0])) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected_text] * 16


def test_killed_draft_worker_changes_nothing(url, expected_text):
    """SIGKILL of the draft worker in mid stream: same text; then drafts come again from a new process."""
    assert kill_mid_stream(url, "draft") == expected_text
    answer = complete(url)
    assert answer["choices"][0]["text"] == expected_text
    assert drafted(answer) > 0


def test_killed_verifier_is_replaced_under_the_stream(url, expected_text):
    """SIGKILL of the verifier in mid stream: the stream waits and ends with the same text."""
    assert kill_mid_stream(url, "target") == expected_text


def counted(url: str) -> float:
    """Requests that went on behind another coordinator."""
    found = Scrape(httpx.get(f"{url}/metrics", timeout=WAIT_S).text)
    return found.sum("specserve_requests_resumed_total")


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.full)])
def test_open_streams_of_ten_kinds_survive_their_coordinator(url, expected_text, times):
    """Greedy and coupled answers are the same; others are whole; usage, scores and reasons are those of one piece."""
    kinds = KINDS | {"stop": KINDS["stop"] | {"stop": [expected_text[-60:-40], "nothing like it"]}}
    calm = dict(zip(kinds, streams(url, list(kinds.values()), killing=False), strict=True))
    weights = {role: pids()[role] for role in ("draft", "target")}
    resumed = counted(url)
    lost = streams(url, times * list(kinds.values()), killing=True)
    for kind, answer in zip(times * list(kinds), lost, strict=True):
        expected = calm[kind]
        assert not answer.errors, (kind, answer.errors)
        assert answer.done == 1, kind
        assert answer.usage["prompt_tokens"] == expected.usage["prompt_tokens"], kind
        if kind == "rejection":
            assert answer.usage["completion_tokens"] == TOKENS
            continue
        assert answer.texts == expected.texts, kind
        assert answer.reasons == expected.reasons, kind
        assert answer.scored == expected.scored, kind
        assert answer.usage["completion_tokens"] == expected.usage["completion_tokens"], kind
    assert calm["logprobs"].scored == len(PROMPT) + TOKENS
    assert re.fullmatch("(yes|no|maybe){60}!", calm["structured"].texts[0])
    assert calm["stop"].reasons == {0: "stop"}
    assert expected_text.startswith(calm["stop"].texts[0])
    assert {role: pids()[role] for role in weights} == weights  # they kept their weights
    until(lambda: idle(url))
    assert counted(url) - resumed >= len(lost) / 2


def test_a_request_that_comes_while_there_is_no_coordinator_waits(url, expected_text):
    """It is answered when there is one again, instead of being refused."""
    pid = pids()["coordinator"]
    os.kill(pid, signal.SIGKILL)
    answer = Answer()
    ask(url, {}, answer)
    assert not answer.errors
    assert answer.texts == {0: expected_text}
    until(lambda: pids()["coordinator"] != pid and healthy(url))


@pytest.mark.full
def test_a_stream_survives_one_coordinator_after_another(url, expected_text):
    """The second one dies when it has just gone on."""
    answer = Answer()
    thread = threading.Thread(target=ask, args=(url, {}, answer))
    thread.start()
    for _ in range(2):
        pid = pids()["coordinator"]
        answer.began.wait(WAIT_S)
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: pids()["coordinator"] != pid)
    thread.join()
    assert not answer.errors
    assert answer.texts == {0: expected_text}


def test_metrics_over_http(url):
    """The coordinator's counters are behind /metrics."""
    text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
    assert "specserve_round_seconds_count" in text


def test_a_taken_port_is_refused_before_anything_starts(config):
    """A port in use is a ConfigError that names it."""
    from specserve.cluster.launch import serve_until_stopped

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = config.server.model_copy(update={"port": port})
        with pytest.raises(ConfigError, match=str(port)):
            serve_until_stopped(config.model_copy(update={"server": server}))
