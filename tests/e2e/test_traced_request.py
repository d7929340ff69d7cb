"""One request as one trace, in a real collector: ingress, coordinator, draft rounds, verify rounds."""

from __future__ import annotations

import secrets
from itertools import pairwise

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra specserve[tracing]")

from http_server import serving
from span_collector import Collector, Seen, collecting
from tiny_models import equal_pair

from specserve.local import LocalEngine

SERVER, INTERNAL = 2, 1
PROMPT = "a word that nobody else says: xylophone"


@pytest.fixture(scope="module")
def collector():
    with collecting() as found:
        yield found


@pytest.fixture(scope="module", params=[0, 3], ids=["draft-then-verify", "ahead"])
def url(request, tmp_path_factory, collector):
    """Two equal tiny models, so that drafts are kept."""
    config = {
        "model_name": "tiny",
        **equal_pair(tmp_path_factory.mktemp("models"), kv_blocks=128, threads=1),
        "engine": {"depth": 3, "prefill_chunk": 16, "outcomes": request.param},
        "observe": {"tracing": {"exporter": "otlp", "endpoint": collector.url, "share": 0}},
    }
    with LocalEngine(config) as engine, serving(engine) as address:
        yield address


def traced(url: str, collector: Collector, path: str, **body: object) -> tuple[dict, list[Seen], str]:
    """A request under a client's own span: the answer, the spans of its trace, and the id of the client's span."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace}-{span}-01", "x-request-id": "mine"}
    answer = httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=60)
    wanted = answer.json().get("usage", {}).get("completion_tokens", 0)

    def complete() -> bool:
        tokens = [each.attributes.get("specserve.tokens", 0) for each in collector.of(trace) if each.name == "verify"]
        return sum(tokens) == wanted and any(each.parent == span for each in collector.of(trace))

    collector.until(complete)
    return answer.json(), collector.of(trace), span


def named(spans: list[Seen], name: str) -> list[Seen]:
    return [span for span in spans if span.name == name]


@pytest.fixture(scope="module")
def chat(url, collector) -> tuple[dict, list[Seen], str]:
    """A greedy chat, for all tests that look at one."""
    messages = [{"role": "user", "content": PROMPT}]
    options = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "seed": 5, "top_p": 0.9}
    return traced(url, collector, "chat/completions", messages=messages, **options)


def test_the_parts_of_a_request_hang_together(chat):
    """Client's span → answer → request → queue, prompt, and every round of draft and verifier; no span is left over."""
    _, spans, client = chat
    (answer,) = named(spans, "chat tiny")
    (request,) = named(spans, "request")
    assert (answer.parent, answer.kind) == (client, SERVER)
    assert (request.parent, request.kind) == (answer.id, INTERNAL)
    inner = [span for span in spans if span not in (answer, request)]
    assert {span.name for span in inner} == {"queue", "prefill", "draft", "verify"}
    assert {span.parent for span in inner} == {request.id}
    assert len(named(spans, "queue")) == len(named(spans, "prefill")) == 1
    assert len({span.id for span in spans}) == len(spans)
    assert answer.process.startswith("ingress-")
    assert {span.process.split("-")[0] for span in [request, *inner]} == {"coordinator"}


def test_rounds_add_up_to_the_answer(chat, request):
    """Tokens, rounds, drafted and accepted tokens of the rounds sum to those of request and answer."""
    answer, spans, _ = chat
    (whole,) = named(spans, "request")
    rounds = named(spans, "verify")
    usage = answer["usage"]

    def total(name: str) -> int:
        return sum(span.attributes.get(f"specserve.{name}", 0) for span in rounds)

    assert total("tokens") == usage["completion_tokens"] == whole.attributes["gen_ai.usage.output_tokens"] == 24
    assert total("drafted") == whole.attributes["specserve.drafted"]
    assert total("accepted") == whole.attributes["specserve.accepted"]
    # Every round but the one that ended the prompt feeds its newest token.
    assert total("fed_tokens") == usage["prompt_tokens"] + whole.attributes["specserve.rounds"] - 1
    assert whole.attributes["specserve.rounds"] == sum("specserve.tokens" in span.attributes for span in rounds)
    assert len(rounds) > whole.attributes["specserve.rounds"]  # the prompt came in chunks
    if "ahead" not in request.node.name:  # where a draft need not come in time
        assert total("accepted") > 0
        assert "bonus" in {span.attributes.get("specserve.chosen") for span in rounds}


def test_the_answer_speaks_the_genai_conventions(chat):
    """Names and values, and not a word of prompt or answer."""
    answer, spans, _ = chat
    (span,) = named(spans, "chat tiny")
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "specserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 5,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 24,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "specserve.request_id": "mine",
    }
    text = answer["choices"][0]["message"]["content"]
    for each in spans:
        assert not each.failed
        assert "xylophone" not in str(each)
        assert text not in str(each)


def test_spans_lie_where_things_happened(chat):
    """All within the request, that within the answer; the queue ends where the prompt begins; busy fits each batch."""
    _, spans, _ = chat
    (answer,), (request,) = named(spans, "chat tiny"), named(spans, "request")
    slack = 5_000_000  # the coordinator's clock was set beside the epoch's once
    assert answer.began - slack <= request.began <= request.ended <= answer.ended + slack
    (queue,), (prefill,) = named(spans, "queue"), named(spans, "prefill")
    assert queue.began == request.began
    assert abs(queue.ended - prefill.began) <= 1000
    for span in named(spans, "draft") + named(spans, "verify"):
        assert request.began <= span.began <= span.ended
        assert 0 < span.attributes["specserve.busy_s"] <= (span.ended - span.began) / 1e9 + 1e-6
    rounds = named(spans, "verify")
    assert all(one.ended <= other.began for one, other in pairwise(rounds))


def test_drafts_beside_the_verifier_overlap_it(chat, request):
    """Drafting ahead shows as batches side by side; draft-then-verify never does."""
    _, spans, _ = chat
    rounds = named(spans, "verify")
    beside = [d for d in named(spans, "draft") for v in rounds if d.began < v.ended and v.began < d.ended]
    ahead = "ahead" in request.node.name
    assert bool(beside) == ahead


def test_answers_of_one_request_are_requests_of_one_span(url, collector):
    """n = 2 makes two sequences under one answer, whose prompt counts once."""
    answer, spans, _ = traced(url, collector, "completions", prompt=PROMPT, n=2, max_tokens=8, ignore_eos=True)
    (span,) = named(spans, "text_completion tiny")
    requests = named(spans, "request")
    assert {each.parent for each in requests} == {span.id}
    assert {each.attributes["specserve.branch"] for each in requests} == {0, 1}
    assert span.attributes["gen_ai.response.id"] == answer["id"]
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert span.attributes["gen_ai.usage.output_tokens"] == 16


def test_who_says_no_is_not_traced(url, collector):
    """The flag of a traceparent decides; without one the share does, which is 0 here."""
    before = {span.trace for span in collector.spans}
    for headers in ({}, {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"}):
        body = {"prompt": PROMPT, "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    _, spans, _ = traced(url, collector, "completions", prompt=PROMPT, max_tokens=4)  # sends what was before, too
    assert {span.trace for span in collector.spans} - before == {spans[0].trace}
