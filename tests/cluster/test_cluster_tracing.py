"""One request across the processes of a real deployment, in a real collector."""

from __future__ import annotations

import secrets

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra specserve[tracing]")

from cluster_facts import TOKENS
from deployment import WAIT_S, body, served
from span_collector import collecting

from specserve.config import TracingConfig

pytestmark = [pytest.mark.ray, pytest.mark.full]


def test_a_trace_goes_through_http_and_ingress_to_the_coordinator(config, ray_here):
    """The client's traceparent, two processes, and every round of both workers, in one trace."""
    with collecting() as collector:
        tracing = TracingConfig(exporter="otlp", endpoint=collector.url)
        observe = config.observe.model_copy(update={"tracing": tracing})
        trace, client = secrets.token_hex(16), secrets.token_hex(8)
        with served(config.model_copy(update={"observe": observe})) as url:
            headers = {"traceparent": f"00-{trace}-{client}-01"}
            answer = httpx.post(f"{url}/v1/completions", json=body(), headers=headers, timeout=WAIT_S)
            assert answer.status_code == 200, answer.text
            collector.until(lambda: {"text_completion tiny", "request"} <= {span.name for span in collector.of(trace)})
        spans = collector.of(trace)
    by_name = {name: [span for span in spans if span.name == name] for name in {span.name for span in spans}}
    (outer,), (request,) = by_name["text_completion tiny"], by_name["request"]
    assert outer.parent == client
    assert request.parent == outer.id
    assert {span.parent for name in ("queue", "prefill", "draft", "verify") for span in by_name[name]} == {request.id}
    assert outer.process.startswith("ingress-")
    assert {span.process for span in spans if span is not outer} == {request.process}
    assert request.process.startswith("coordinator-")
    assert request.process.split("-")[1] != outer.process.split("-")[1]
    assert sum(span.attributes["specserve.tokens"] for span in by_name["verify"]) == TOKENS
