"""The API on real (tiny) models: predictions, sources, rules, tools, and clients that leave in the middle."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest
from http_server import serving
from prometheus_client.parser import text_string_to_metric_families
from templates_with_tools import TAGGED
from tiny_models import tiny_llama

from specserve.local import LocalEngine

TOOL = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}, "on": {"type": "boolean"}},
            "required": ["colour", "on"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target, draft = tiny_llama(root / "target", seed=1), tiny_llama(root / "draft", seed=2, layers=1)
    for folder in (target, draft):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TAGGED}))
    config = {
        "model_name": "tiny",
        "target": {"source": str(target), "kv_memory_gib": 0.1},
        "draft": {"model": {"source": str(draft), "kv_memory_gib": 0.1}},
        "engine": {"depth": 4, "max_requests": 64, "max_batch_tokens": 384, "prefill_chunk": 64},
    }
    with LocalEngine(config) as engine, serving(engine) as url:
        yield url


def completed(url, **fields):
    body = {"prompt": "The quick brown fox", "max_tokens": 40, "temperature": 0, "ignore_eos": True} | fields
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_right_prediction_is_accepted_whole_and_saves_rounds(server):
    """The answer itself as prediction: 39 of 40 tokens come as predicted, 5 a round; the first comes with the prompt.

    All tokens are single capitals, so that the text has no other tokens than those that wrote it.
    """
    capitals = httpx.post(f"{server}/tokenize", json={"prompt": "ABCDFGHIJKLMNQRUVWXYZ"}).json()["tokens"]
    assert len(capitals) == 21
    options = {"allowed_token_ids": capitals, "frequency_penalty": 1}
    text = completed(server, **options, speculation={"enabled": False})["choices"][0]["text"]
    assert len(set(text)) > 10
    predicted = completed(server, **options, prediction={"type": "content", "content": text})
    numbers = predicted["metrics"]["speculative_decoding"]
    assert predicted["choices"][0]["text"] == text
    assert predicted["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 39,
        "rejected_prediction_tokens": 0,
    }
    assert numbers["num_spec_steps"] == 9


@pytest.mark.parametrize("content", ["zzzz qqqq xxxx " * 3, "The lazy dog 0123456789"])
def test_a_wrong_prediction_changes_nothing_but_the_counts(server, content):
    """Greedy text is the same; what was tried of it is counted as rejected, and completion_tokens stay those sent."""
    plain = completed(server, speculation={"enabled": False})
    predicted = completed(server, prediction={"type": "content", "content": content})
    details = predicted["usage"]["completion_tokens_details"]
    assert predicted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert predicted["usage"]["completion_tokens"] == 40
    assert details["rejected_prediction_tokens"] > 0
    assert plain["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }


@pytest.mark.parametrize("source", ["small_model", "ngram"])
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "exact"])
def test_sources_and_rules_by_request_change_no_greedy_answer(server, source, rule):
    """Each is named in the answer's numbers."""
    wish = {"enabled": True, "depth": 3, "rule": rule, "source": source}
    plain = completed(server, speculation={"enabled": False})
    found = completed(server, speculation=wish)
    numbers = found["metrics"]["speculative_decoding"]
    assert found["choices"][0]["text"] == plain["choices"][0]["text"]
    assert (numbers["rule"], numbers["source"], numbers["lossless"]) == (rule, source, True)
    assert len(numbers["acceptance_histogram"]) == 4
    assert sum(numbers["acceptance_histogram"]) == numbers["num_spec_steps"]


def test_prompt_lookup_by_request_finds_repeats(server):
    """A prompt that repeats itself is drafted from by `ngram`, beside a deployment with a draft model."""
    prompt = "one two three four five " * 6
    numbers = completed(server, prompt=prompt, speculation={"source": "ngram"})["metrics"]["speculative_decoding"]
    assert numbers["num_draft_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [1.5])
def test_a_required_call_is_always_one_that_can_be_made(server, stream, temperature):
    """Even random weights call the tool with arguments of its schema, drafted or not."""
    body = {
        "messages": [{"role": "user", "content": "lamp"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": temperature,
        "stream": stream,
    }
    reply = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        finish = choices[-1]["finish_reason"]
    else:
        (choice,) = reply.json()["choices"]
        calls, finish = choice["message"]["tool_calls"], choice["finish_reason"]
    (made,) = calls
    arguments = json.loads(made["function"]["arguments"])
    assert (made["function"]["name"], finish) == ("set_lamp", "tool_calls")
    assert arguments["colour"] in ("red", "green")
    assert isinstance(arguments["on"], bool)


def gauges(url):
    """The sum of everything that is held or running."""
    names = {"num_requests_running", "num_requests_waiting", "kv_blocks", "slots"}
    names = {f"specserve_{name}" for name in names}
    held, seen = 0.0, set()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name in names and sample.labels.get("state", "held") not in ("free", "cached"):
                held += sample.value
                seen.add(sample.name)
    assert seen == names
    return held


async def streamed(client, prompt, leave_after):
    """The text of a stream; of one that leaves, what came before."""
    body = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "stream": True}
    pieces = []
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) == leave_after:
                    break
    return "".join(pieces)


def test_of_64_streams_half_leave_and_the_others_notice_nothing(server):
    """The texts of those that stay are what they are alone; two seconds later nothing is held."""
    prompts = [f"{word} {index}" for index in range(8) for word in ("fox", "dog", "lazy", "jump")]

    async def run(leavers):
        limits = httpx.Limits(max_connections=80)
        async with httpx.AsyncClient(base_url=server, timeout=120, limits=limits) as client:
            stay = [streamed(client, prompt, None) for prompt in prompts]
            leave = [streamed(client, f"gone {index}", 1 + index % 5) for index in range(leavers)]
            both = asyncio.gather(*stay, *leave)
            while not await asyncio.to_thread(gauges, server):
                await asyncio.sleep(0.02)
                assert not both.done(), "the streams ended and nothing was ever held"
            return (await both)[: len(prompts)]

    alone = asyncio.run(run(0))
    beside = asyncio.run(run(32))
    deadline = time.monotonic() + 2
    while gauges(server) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert beside == alone
    assert gauges(server) == 0
