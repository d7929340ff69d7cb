"""Facts about answers that are not streamed: what the engine is asked, and what the client gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_engine import CARD, TOKENIZER, ScriptedEngine, app_of, chat, complete, said, stats, usage

from specserve.types import Delta, Failure, Request, RequestId, Sampling


def test_a_chat_answer_has_the_whole_shape() -> None:
    """All fields of a chat completion are there and agree with the deltas."""
    engine = ScriptedEngine(said("Hel", "lo", stop_reason=2))
    body = chat(app_of(engine)).json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == (
        0,
        "stop",
        None,
        None,
    )
    (request,) = engine.requests
    sent = sum(len(TOKENIZER.encode(text, special=False)) for text in ("Hel", "lo"))
    assert body["usage"] == usage(len(request.prompt), sent)
    assert engine.closed == [request.id]


def test_the_engine_gets_the_templated_prompt_and_defaults() -> None:
    """A bare chat request samples at temperature 1 and may fill the context."""
    engine = ScriptedEngine(said("x"))
    chat(app_of(engine), messages=[{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}])
    (request,) = engine.requests
    expected = "<|start|>system\na<|end|>\n<|start|>user\nb<|end|>\n<|start|>assistant\n"
    assert TOKENIZER.decode(request.prompt, skip_special=False) == expected
    assert request.sampling == Sampling(1.0, 1.0, 0)
    assert request.max_tokens == CARD.context_length - len(request.prompt)
    assert (request.stop, request.stop_token_ids, request.ignore_eos, request.depth) == ((), (), False, None)


def test_every_field_reaches_the_engine() -> None:
    """Sampling, stops, seed, limits and speculation arrive as they were sent."""
    engine = ScriptedEngine(said("x"))
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "seed": -3,
        "max_tokens": 9,
        "max_completion_tokens": 4,
        "speculation": {"depth": 2},
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": 200, "8": -0.5},
        "min_tokens": 3,
        "allowed_token_ids": [5, 7, 8],
        "bad_words": ["fox"],
        "logprobs": True,
        "top_logprobs": 2,
    }
    assert chat(app_of(engine), **fields).status_code == 200
    (request,) = engine.requests
    words = tuple(tuple(TOKENIZER.encode(text, special=False)) for text in ("fox", " fox"))
    bias = ((7, 100.0), (8, -0.5))
    assert request.sampling == Sampling(0.0, 0.5, 7, 0.25, 1.5, -2.0, 0.5, bias, 3, words, (5, 7, 8))
    assert (request.logprobs, request.prompt_logprobs, request.branch, request.family) == (2, None, 0, None)
    assert (request.stop, request.stop_token_ids, request.ignore_eos) == (("a", "b"), (5,), True)
    assert (request.seed, request.max_tokens, request.depth) == (-3, 4, 2)


@pytest.mark.parametrize(
    ("speculation", "depth"),
    [(None, None), ({}, None), ({"enabled": True}, None), ({"enabled": False}, 0), ({"enabled": False, "depth": 3}, 0)],
)
def test_speculation_can_be_switched_off(speculation: object, depth: int | None) -> None:
    """enabled false is depth 0; nothing said is the deployment's depth."""
    engine = ScriptedEngine(said("x"))
    complete(app_of(engine), speculation=speculation)
    assert engine.requests[0].depth == depth


def test_a_seed_is_drawn_when_none_is_given() -> None:
    """Two requests without a seed get different ones, each an int64."""
    engine = ScriptedEngine(said("x"))
    complete(app_of(engine), prompt=["a", "b"])
    one, two = (request.seed for request in engine.requests)
    assert one != two
    assert 0 <= min(one, two) <= max(one, two) < 2**63


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    """null, and whatever asks for nothing, is no reason to refuse; bookkeeping fields are taken and ignored."""
    engine = ScriptedEngine(said("x"))
    neutral = {
        "n": 1,
        "best_of": 1,
        "logprobs": False,
        "top_logprobs": None,
        "logit_bias": {},
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "min_p": 0,
        "min_tokens": 0,
        "bad_words": [],
        "allowed_token_ids": None,
        "response_format": {"type": "text"},
        "tools": None,
        "tool_choice": "none",
        "stop": None,
        "temperature": None,
        "max_tokens": None,
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "anything_else": [1],
    }
    assert chat(app_of(engine), **neutral).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [TOKENIZER.encode("ab", special=True)]),
        ([5, 6], [[5, 6]]),
        (["a", "b"], [TOKENIZER.encode(text, special=True) for text in "ab"]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_all_four_forms_of_a_prompt(prompt: object, expected: list[list[int]]) -> None:
    """A text, ids, texts and lists of ids become one sequence each, answered in order."""

    def script(request: Request) -> list[object]:
        return said(f"answer to {len(request.prompt)} {request.prompt[0]}", finish="length")

    engine = ScriptedEngine(script)  # type: ignore[arg-type]
    body = complete(app_of(engine), prompt=prompt).json()
    by_id = sorted(engine.requests, key=lambda request: request.id)
    assert [list(request.prompt) for request in by_id] == expected
    assert len({request.id for request in by_id}) == len(expected)
    texts = [f"answer to {len(ids)} {ids[0]}" for ids in expected]
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert ("metrics" in body) is (len(expected) == 1)


def test_completions_are_short_unless_asked() -> None:
    """max_tokens defaults to the configured length; only the sum with the prompt over the context is clamped."""
    engine = ScriptedEngine(said("x"))
    app = app_of(engine, default_max_tokens=16)
    complete(app, prompt=[5] * 10)
    complete(app, prompt=[5] * 250, max_tokens=100)
    complete(app, prompt=[5] * 250)
    assert [request.max_tokens for request in engine.requests] == [16, 6, 6]


def test_content_parts_are_joined() -> None:
    """Text parts become lines; an assistant turn without content is empty."""
    engine = ScriptedEngine(said("x"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat(app_of(engine), messages=[{"role": "assistant", "content": None}, {"role": "user", "content": parts}])
    text = TOKENIZER.decode(engine.requests[0].prompt, skip_special=False)
    assert text.startswith("<|start|>assistant\n<|end|>\n<|start|>user\na\nb<|end|>\n")


def test_a_stop_text_is_cut_out() -> None:
    """The text ends before the stop text, however the tokens fell; tokens that complete it are counted."""
    engine = ScriptedEngine(said("one E", "ND", stop_reason="END"))
    body = complete(app_of(engine), stop=["END", "never"]).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "END")
    assert body["usage"]["completion_tokens"] == sum(
        len(TOKENIZER.encode(text, special=False)) for text in ("one E", "ND")
    )


def test_a_held_back_beginning_is_shown_at_the_end() -> None:
    """What only looked like a stop text belongs to the answer."""
    assert (
        complete(app_of(ScriptedEngine(said("an E", finish="length"))), stop="END").json()["choices"][0]["text"]
        == "an E"
    )


@pytest.mark.parametrize(("named", "reason"), [([], None), ([2], 2)])
def test_only_a_named_stop_token_is_a_stop_reason(named: list[int], reason: int | None) -> None:
    """The model's own end token is the ordinary end; the same id is a reason when the client named it."""
    body = complete(app_of(ScriptedEngine(said("x", stop_reason=2))), stop_token_ids=named).json()
    assert body["choices"][0]["stop_reason"] == reason


def test_nothing_after_the_finish_is_taken() -> None:
    """Deltas behind the one that ends the answer are never read."""
    engine = ScriptedEngine([*said("done"), *said(" more")])
    assert complete(app_of(engine)).json()["choices"][0]["text"] == "done"
    assert engine.yielded == 1


def test_the_numbers_of_a_single_sequence() -> None:
    """The metrics object holds times and an acceptance histogram padded to the chain length + 1."""
    numbers = stats(11, histogram=(1, 0, 2))
    body = complete(app_of(ScriptedEngine(said("x", stats_=numbers)))).json()
    assert body["metrics"] == {
        "time_to_first_token_ms": 50.0,
        "queue_time_ms": 10.0,
        "generation_time_ms": 200.0,
        "mean_itl_ms": 20.0,
        "tokens_per_second": 50.0,
        "speculative_decoding": {
            "mean_acceptance_length": round(1 + 4 / 3, 4),
            "draft_acceptance_rate": round(4 / 6, 4),
            "acceptance_histogram": [1, 0, 2, 0, 0],
            "num_spec_steps": 3,
            "num_accepted_draft_tokens": 4,
            "num_draft_tokens": 6,
            "num_spec_tokens": 4,
            "rule": "rejection",
            "lossless": True,
            "source": "small_model",
        },
    }


def test_no_speculation_numbers_without_speculation() -> None:
    """A request at depth 0 reports times only."""
    numbers = replace(stats(1, histogram=(3,)), drafted_tokens=0)
    body = complete(app_of(ScriptedEngine(said("x", stats_=numbers))), speculation={"enabled": False}).json()
    assert "speculative_decoding" not in body["metrics"]
    assert body["metrics"]["tokens_per_second"] is None


def test_a_failure_after_tokens_is_a_status_when_nothing_was_sent() -> None:
    """A whole answer that failed half-way has the failure's status."""
    failed = Delta(RequestId(""), (), finish="error", failure=Failure(503, "verifier_lost", "gone"))
    response = complete(app_of(ScriptedEngine([*said("a", "b")[:1], failed])))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "verifier_lost")


def test_a_stream_that_just_ends_is_a_500() -> None:
    """An engine that stops without a finish is a bug, not an answer."""
    assert complete(app_of(ScriptedEngine(said("a", "b")[:1]))).status_code == 500


def test_one_failing_sequence_cancels_the_others() -> None:
    """With several prompts the first failure is the answer, and every engine stream is closed."""

    def script(request: Request) -> list[object]:
        failed = Delta(RequestId(""), (), finish="error", failure=Failure(503, "verifier_lost", "gone"))
        return [failed] if request.prompt == (6,) else said(*"abcdefgh")

    engine = ScriptedEngine(script)  # type: ignore[arg-type]
    assert complete(app_of(engine), prompt=[[5], [6], [7]]).status_code == 503
    assert sorted(engine.closed) == sorted(request.id for request in engine.requests)


def test_the_fingerprint_changes_with_the_deployment() -> None:
    """Same deployment, same fingerprint; the server's HTTP limits are no part of it."""
    one, two = (complete(app_of(ScriptedEngine(said("x")), port=port)).json() for port in (1, 2))
    assert one["system_fingerprint"] == two["system_fingerprint"]
    assert one["system_fingerprint"].startswith("fp_")
