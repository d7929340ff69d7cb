"""A real model's seeded answers under `engine.batch_invariant`: the same to the last bit, whatever else runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_models import tiny_llama

from specserve.local import Completion, LocalEngine
from specserve.models import _panels
from specserve.types import Request, RequestId, Sampling

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.9, top_k=40),
    Sampling(temperature=1.2, min_p=0.02, frequency_penalty=0.3),
]
COUNT, LENGTH = 8, 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    return [tiny_llama(tmp_path_factory.mktemp(name), seed=seed) for name, seed in (("target", 1), ("draft", 2))]


@contextmanager
def running(folders: list[Path], invariant: bool = True, **settings: int) -> Iterator[LocalEngine]:
    models = [{"source": str(folder), "device": "cpu", "kv_blocks": 64} for folder in folders]
    engine = {"max_requests": 8, "rule": "coupled", "batch_invariant": invariant, "max_batch_tokens": 128} | settings
    with LocalEngine({"target": models[0], "draft": {"model": models[1]}, "engine": engine}) as made:
        yield made


def request(number: int, depth: int) -> Request:
    prompt = tuple(3 + (number * 31 + j * 17) % 200 for j in range(5 + 20 * (number % 4)))
    return Request(
        RequestId(f"r{number}"),
        prompt,
        LENGTH,
        SAMPLINGS[number % len(SAMPLINGS)],
        seed=100 + number,
        ignore_eos=True,
        depth=depth,
        logprobs=2,
    )


def said(answer: Completion) -> tuple[object, ...]:
    """Text, tokens and every log-probability of an answer, as they are."""
    return answer.text, answer.tokens, answer.logprobs


@pytest.fixture(scope="module")
def alone(folders) -> list[tuple[object, ...]]:
    """Each answer without speculation and without company."""
    with running(folders, depth=4) as engine:
        return [said(engine.complete([request(number, 0)])[0]) for number in range(COUNT)]


@pytest.mark.parametrize(
    ("depth", "settings"),
    [
        (0, {}),
        (1, {"prefill_chunk": 7}),
        (4, {"max_batch_tokens": 40}),
        pytest.param(7, {"depth": 7, "prefill_chunk": 16}, marks=pytest.mark.full),
        pytest.param(3, {"max_requests": 3}, marks=pytest.mark.full),
    ],
)
def test_answers_are_bit_identical_in_any_company_and_at_any_depth(folders, alone, depth, settings) -> None:
    """Eight requests at once, prompts in other pieces, other chains: the same texts and log-probabilities."""
    with running(folders, **{"depth": 4} | settings) as engine:
        assert [said(answer) for answer in engine.complete([request(n, depth) for n in range(COUNT)])] == alone


def test_without_the_mode_log_probabilities_differ(folders, monkeypatch) -> None:
    """The same comparison sees other bits where torch computes an ordinary target; our own kernels are invariant."""
    monkeypatch.setattr(_panels, "kernels", lambda: None)
    with running(folders, invariant=False, depth=4) as engine:
        alone = [said(engine.complete([request(number, 0)])[0]) for number in range(COUNT)]
        assert [said(answer) for answer in engine.complete([request(n, 4) for n in range(COUNT)])] != alone
