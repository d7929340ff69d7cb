"""Facts about the spans of requests, whatever happens to workers and requests meanwhile."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from harness import Pipeline

pytest.importorskip("opentelemetry.sdk", reason="needs the extra specserve[tracing]")

from specserve.config import TracingConfig
from specserve.tracing import tracer_of

TRACE = "ab" * 16
PARENT = f"00-{TRACE}-{'cd' * 8}-01"


class Traced:
    """A pipeline of toy workers whose spans go to a file."""

    def __init__(self, folder, **settings):
        self.path = folder / "spans.jsonl"
        self.tracer = tracer_of(TracingConfig(exporter="file", path=str(self.path)), "coordinator")
        self.pipeline = Pipeline(tracer=self.tracer, **settings)

    def submit(self, name, prompt=(1, 2, 3), **options):
        self.pipeline.submit(name, prompt, trace=PARENT, **options)

    def spans(self):
        """All there is, by request."""
        self.tracer.close()
        found = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        requests = {span["context"]["span_id"]: span for span in found if span["name"] == "request"}
        inner = [span for span in found if span["name"] != "request"]
        assert all(span["parent_id"] in requests for span in inner), "a span without its request"
        assert {span["context"]["trace_id"] for span in found} <= {f"0x{TRACE}"}
        return {
            request["attributes"]["specserve.request"]: (
                request,
                [span for span in inner if span["parent_id"] == number],
            )
            for number, request in requests.items()
        }


@pytest.fixture
def traced(tmp_path):
    return Traced(tmp_path)


def test_only_requests_that_bring_a_trace_are_followed(traced):
    """Those beside them in the same batches leave nothing."""
    traced.submit("a")
    traced.pipeline.submit("b", [4, 5, 6])
    traced.pipeline.settle()
    assert traced.spans().keys() == {"a"}


@pytest.mark.parametrize("outcomes", [0, 2])
def test_a_request_ends_its_span_once_however_it_ends(tmp_path, outcomes):
    """Finished, cancelled while it waits, cancelled while it is verified: one span each, and none stays open."""
    traced = Traced(tmp_path, outcomes=outcomes, max_requests=2)
    for name in ("full", "gone", "waits"):
        traced.submit(name, max_tokens=20)
    for _ in range(6):
        traced.pipeline.step()
    for name in ("gone", "waits"):
        traced.pipeline.engine.cancel(name)
    traced.pipeline.settle()
    assert not traced.pipeline.engine._traces._open
    spans = traced.spans()
    finish = {name: request["attributes"]["specserve.finish"] for name, (request, _) in spans.items()}
    assert finish == {"full": "length", "gone": "abort", "waits": "abort"}
    assert Counter(span["name"] for span in spans["waits"][1]) == {"queue": 1}
    names = Counter(span["name"] for span in spans["full"][1])
    assert names["verify"] == spans["full"][0]["attributes"]["specserve.rounds"]
    assert names["draft"] > 0


def test_every_drafted_and_accepted_token_is_in_a_round(traced):
    """Also of two requests that share batches, each counts its own."""
    traced.submit("a", max_tokens=17)
    traced.submit("b", prompt=[7, 8, 9], max_tokens=11)
    traced.pipeline.settle()
    for name, (request, inner) in traced.spans().items():
        rounds = [span["attributes"] for span in inner if span["name"] == "verify"]
        assert sum(each["specserve.tokens"] for each in rounds) == len(traced.pipeline.tokens(name))
        for what in ("drafted", "accepted"):
            assert sum(each[f"specserve.{what}"] for each in rounds) == request["attributes"][f"specserve.{what}"] > 0
        assert all(each["specserve.batch_rows"] <= 2 for each in rounds)


def test_lost_workers_leave_whole_traces(traced):
    """Draft lost, then the verifier, both restarted: all rounds of the answer are there, and it did not fail."""
    traced.submit("a", max_tokens=30)
    for lost in ("draft", "target"):
        for _ in range(7):
            traced.pipeline.step()
        traced.pipeline.lose(lost)
        traced.pipeline.restart(lost)
    traced.pipeline.settle()
    request, inner = traced.spans()["a"]
    rounds = [span["attributes"] for span in inner if span["name"] == "verify"]
    assert sum(each.get("specserve.tokens", 0) for each in rounds) == 30
    assert request["status"]["status_code"] == "UNSET"


def test_a_verifier_that_stays_away_fails_the_span(tmp_path):
    """With the code that the client gets."""
    traced = Traced(tmp_path, recovery_wait_s=5.0)
    traced.submit("a", max_tokens=30)
    traced.pipeline.step()
    traced.pipeline.lose("target")
    traced.pipeline.clock.now += 6
    traced.pipeline.settle()
    request, _ = traced.spans()["a"]
    assert request["attributes"]["error.type"] == "verifier_lost"
    assert request["status"]["status_code"] == "ERROR"


def test_a_failed_engine_ends_all_spans(traced):
    """Nobody is served any more, and every request says so."""
    traced.submit("a")
    traced.pipeline.step()
    traced.pipeline.engine.abandon("the coordinator failed")
    traced.pipeline.engine.flush()
    request, _ = traced.spans()["a"]
    assert request["attributes"]["error.type"] == "internal_error"
