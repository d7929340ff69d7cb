"""The load bench: loops, sums, and a run against a real server."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from http_server import serving
from tiny_models import tiny_llama

from specserve.bench import load
from specserve.bench.byte_client import ByteClient
from specserve.bench.load import Call, Options, closed_loop, http_side_s, measure, open_loop, plot, quantile, row_of
from specserve.cli import main
from specserve.errors import ConfigError, Unavailable
from specserve.local import LocalEngine


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    # the longest prompt that a load may choose is of 930 bytes, each of which is a token here
    folder = tiny_llama(tmp_path_factory.mktemp("target"), seed=1, context=2048)
    config = {"model_name": "tiny", "target": {"source": str(folder), "kv_memory_gib": 0.05}}
    with LocalEngine(config | {"draft": {"speculator": "ngram"}}) as engine, serving(engine) as url:
        yield url


def test_a_row_is_what_clients_saw() -> None:
    """Percentiles over the answered ones, good ones by both times, costs by event and by token."""
    calls = [Call(0.1, 0.01, 11, 5), Call(0.2, 0.02, 11, 5), Call(0.9, 0.01, 11, 5), Call(0.1, 0.2, 11, 5), Call(None)]
    row = row_of("closed", 2, calls, 2.0, 0.5, Options())
    assert (row["requests"], row["refused"], row["failed"], row["good_s"]) == (5, 0, 1, 1.0)
    assert (row["tok_s"], row["tok_event"], row["us_event"]) == (22.0, 2.2, 25_000.0)
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"]) == (100.0, 900.0)
    assert row["tpot_ms"] == pytest.approx(60.0)
    assert row["core_64x30"] == pytest.approx(0.5 / 44 * 1920)
    nothing = row_of("open", 1.0, [Call(None)], 2.0, None, Options())
    assert (nothing["tok_s"], nothing["good_s"], nothing["ttft_p99_ms"], nothing["us_event"]) == (0.0, 0.0, None, None)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)])
def test_quantiles_are_values_that_occurred(share, expected) -> None:
    """The smallest that the share does not exceed; nothing has none."""
    assert quantile([4, 2, 3, 1], share) == expected
    assert quantile([], share) is None


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    """Never more at once than clients, each asks again, none is left unanswered."""
    running, most, answered = 0, 0, 0

    async def ask() -> Call:
        nonlocal running, most, answered
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        answered += 1
        return Call(0.01, None, 1, 1)

    calls = asyncio.run(closed_loop(ask, 3, 0.1))
    assert (most, running, len(calls)) == (3, 0, answered)
    assert answered >= 6


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Its requests are those of the seed's gaps, though the first answer comes after the last request."""
    chance = random.Random(5)
    due, expected = 0.0, 0
    while (due := due + chance.expovariate(40.0)) < 0.3:
        expected += 1
    asked = []

    async def ask() -> Call:
        asked.append(time.perf_counter())
        while len(asked) < expected:
            await asyncio.sleep(0.005)
        return Call(0.0, None, 1, 1)

    calls = asyncio.run(open_loop(ask, 40.0, 0.3, random.Random(5)))
    assert len(calls) == expected > 3


@asynccontextmanager
async def answering(head: bytes, body: bytes) -> AsyncIterator[ByteClient]:
    """A client of a server that says the same to all, and then closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (head, len(body), body))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, ByteClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        yield client


@pytest.mark.parametrize(
    ("told", "comes_back_s"),
    [
        (b"Retry-After: 2", 2.0),
        (b"Retry-After: 2\r\nRetry-After-Ms: 1250", 1.25),
        (b"X: y", 1.0),
        (b"Retry-After: Wed, 21 Oct 2026 07:28:00 GMT", 1.0),
    ],
)
def test_who_finds_no_room_comes_back_when_told(told, comes_back_s) -> None:
    """A refusal is no failure, and its client asks nothing before the time that it was given (1 s where none)."""

    async def loaded() -> list[Call]:
        async with answering(b"429 Full\r\n" + told, b'{"error": {"message": "the queue is full"}}') as client:
            answers = await closed_loop(lambda: load.asked(client, "completions", {"prompt": "x"}), 3, 0.3)
        return [answer.call() for answer in answers]

    calls = asyncio.run(loaded())
    assert [call.retry_s for call in calls] == [comes_back_s] * 3
    row = row_of("closed", 3, calls, 0.3, None, Options())
    assert (row["requests"], row["refused"], row["failed"]) == (3, 3, 0)


@pytest.mark.parametrize(
    ("events", "answered"), [(("{}", "[DONE]"), True), (("{}",), False), (('{"error": 1}',), False)]
)
def test_an_answer_without_text_is_an_answer(events, answered) -> None:
    """What ends in good order was answered, if only with an end token; what breaks off or tells of an error was not."""
    lines = [event.replace("{}", '{"choices": [], "usage": {"completion_tokens": 1}}') for event in events]

    async def ask() -> Call:
        async with answering(b"200 OK", "".join(f"data: {line}\n\n" for line in lines).encode()) as client:
            return (await load.asked(client, "chat/completions", {"messages": []})).call()

    call = asyncio.run(ask())
    assert (call.first_s is not None) == answered == (not call.failure)
    assert not answered or (call.tokens, call.events, call.token_s) == (1, 0, None)


def test_failures_are_told_with_their_reason(url, tmp_path) -> None:
    """A load of requests that the server refuses counts them as failed, and tells what it said, once."""
    told: list[str] = []
    rows = measure(Options(url, clients=(2,), rates=(), seconds=0.2, max_tokens=1 << 40), told.append)
    assert rows[0]["failed"] == rows[0]["requests"] >= 2
    (line,) = [line for line in told if "failed" in line]
    assert line.startswith(f"{rows[0]['failed']} failed: 400 This model's maximum context length is 2048 tokens")


def test_a_real_server_is_measured_by_its_address(url, tmp_path, capsys) -> None:
    """Both loops answer all requests; the report is written."""
    report = tmp_path / "load.json"
    arguments = ["--url", f"{url}/v1", "--clients", "2", "--rates", "5", "--seconds", "1", "--max-tokens", "8"]
    assert main(["bench", "load", *arguments, "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [(row["loop"], row["load"], row["failed"]) for row in rows] == [("closed", 2, 0), ("open", 5.0, 0)]
    assert all(row["tok_s"] > 0 and row["us_event"] is None for row in rows)
    assert "closed" in capsys.readouterr().out


def test_the_plot_has_a_panel_for_each_loop(tmp_path) -> None:
    """A file with both titles, also where a load was never answered."""
    pytest.importorskip("matplotlib")
    calls = [Call(0.1, 0.01, 11, 5), Call(None)]
    rows = [row_of(loop, load, calls, 1.0, None, Options()) for loop in ("closed", "open") for load in (1, 8)]
    plot([*rows, row_of("open", 16, [Call(None)], 1.0, None, Options())], tmp_path / "load.svg")
    drawn = (tmp_path / "load.svg").read_text()
    assert "<!-- closed loop -->" in drawn
    assert "<!-- open loop -->" in drawn


def test_what_cannot_be_measured_is_refused_before_anything_starts() -> None:
    """In words, by the option's name; so is a server that is not there."""
    for wrong, told in [
        ({"clients": (0,)}, "--clients"),
        ({"rates": (0.0,)}, "--rates"),
        ({"clients": (), "rates": ()}, "nothing to measure"),
        ({"max_tokens": 1}, "--max-tokens"),
    ]:
        with pytest.raises(ConfigError, match=told):
            measure(Options(**wrong), print)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        measure(Options(url="http://127.0.0.1:9"), print)


def test_only_the_http_side_s_own_processes_are_counted() -> None:
    """A process of ours counts by its title; this one, without such a title, does not."""
    assert http_side_s() == 0
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", code, "Ingress"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used_s = http_side_s()
        child.kill()
    assert used_s >= 0.2
