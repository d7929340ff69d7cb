"""A real model's answers with the prefix cache: the same to the last bit, read from where another request ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_invariant_answers import running
from tiny_models import tiny_llama

from specserve.types import Request, RequestId, Sampling

PROMPT = tuple(3 + (j * 17) % 200 for j in range(70))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    return [tiny_llama(tmp_path_factory.mktemp(name), seed=seed) for name, seed in (("target", 1), ("draft", 2))]


def request(name: str, prompt: tuple[int, ...], depth: int, **fields: object) -> Request:
    options = {"seed": 7, "ignore_eos": True, "depth": depth, "logprobs": 2} | fields
    return Request(RequestId(name), prompt, 12, Sampling(temperature=0.8), **options)


@pytest.mark.parametrize("depth", [0, 4])
def test_cached_kv_gives_the_same_answer_to_the_last_bit(folders, depth):
    """Cold, warm and as a second turn, with every log-probability; batch-invariant logits make that a fair question."""
    with running(folders) as engine:
        cold = engine.complete([request("cold", PROMPT, depth)])[0]
        warm = engine.complete([request("warm", PROMPT, depth)])[0]
        second = engine.complete([request("second", (*PROMPT, *cold.tokens, 5), depth)])[0]
        levels = engine.levels()
    with running(folders, prefix_cache=False) as engine:
        plain = engine.complete([request("plain", (*PROMPT, *cold.tokens, 5), depth)])[0]
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    assert (second.tokens, second.logprobs) == (plain.tokens, plain.logprobs)
    assert [each.stats.cached_tokens for each in (cold, warm, second, plain)] == [0, 64, 80, 0]
    assert levels.target_blocks_held == 0 < levels.target_blocks_cached


def test_scores_of_a_cached_prompt_are_whole(folders):
    """A prompt whose tokens are to be scored is read in full, however much of it is cached."""
    with running(folders) as engine:
        first = engine.complete([request("first", PROMPT, 0, prompt_logprobs=1)])[0]
        again = engine.complete([request("again", PROMPT, 4, prompt_logprobs=1)])[0]
    assert len(again.prompt_logprobs) == len(PROMPT)
    assert again.prompt_logprobs == first.prompt_logprobs
    assert again.stats.cached_tokens == 0
