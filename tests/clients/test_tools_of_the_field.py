"""Harnesses and load generators that people point at servers, each in an environment of its own."""

from __future__ import annotations

import contextlib
import json

import pytest
from client_servers import API_KEY, served
from environments import HERE, python_with, result, run

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


def test_a_harness_scores_the_same_with_and_without_speculation(models, tmp_path) -> None:
    """lm-eval on a tiny local task: texts the same, log-likelihoods within 1e-4, at depth 0, 1, 4 and 8."""
    python = python_with("lm-eval", ["lm-eval[api]==0.4.13", "transformers==5.24.0"])
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(served(models, depth)).url for depth in (0, 1, 4, 8)]
        command = [python, HERE / "lm_eval_tasks.py", tmp_path, models / "target", *urls]
        seen = result(command, timeout_s=900, OPENAI_API_KEY="none", HF_DATASETS_OFFLINE="1")
    plain = seen[urls[0]]
    assert len(plain["texts"]) == len(plain["likelihoods"]) == 4
    assert any(plain["texts"])
    for url in urls[1:]:
        assert seen[url]["texts"] == plain["texts"]
        for row, expected in zip(seen[url]["likelihoods"], plain["likelihoods"], strict=True):
            assert row == pytest.approx(expected, abs=1e-4)


def test_schemathesis_finds_no_server_error(server, tmp_path) -> None:
    """Generated from our own document: no 5xx, and errors as the document says."""
    python = python_with("schemathesis", ["schemathesis==4.32.5"])
    command = [python, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--url", server.url]
    options = ["--checks", "not_a_server_error", "--max-examples", "50", "--seed", "1", "--generation-deterministic"]
    run([*command, *options, "-H", f"Authorization: Bearer {API_KEY}", "--request-timeout", "60"], timeout_s=900)


def test_guidellm_measures_us(models, tmp_path) -> None:
    """A concurrent profile with token counts from the local tokenizer: every request succeeds, none fails."""
    python = python_with("guidellm", ["guidellm==0.8.1"], before=["torch"])
    with served(models) as running:
        command = [
            *(python, "-m", "guidellm", "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={running.url},model=tiny"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"),
            *("--tokenizer", f"kind=hf_auto,model={running.tokenizer}"),
            *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"),
            *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
        ]
        run(command, timeout_s=600)
    (report,) = tmp_path.glob("*.json")
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)


def test_aiperf_shows_acceptance(models, tmp_path) -> None:
    """Its export holds the acceptance length that it reads from our answers, and prediction tokens from usage."""
    python = python_with("aiperf", ["aiperf==0.13.0"])
    with served(models) as running:
        command = [
            *(python, "-m", "aiperf", "profile", "--url", running.url, "--model", "tiny", "--endpoint-type", "chat"),
            *("--streaming", "--tokenizer", running.tokenizer, "--request-count", "6", "--concurrency", "2"),
            *("--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "12", "--ui", "none"),
            *("--extra-inputs", "ignore_eos:true", "--artifact-dir", tmp_path),
        ]
        run(command, timeout_s=600, HF_HUB_OFFLINE="")
    exported = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert "spec_decode_acceptance_length" in exported
