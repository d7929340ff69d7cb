"""Requests of very different lengths that start together, end one by one, and are followed by others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from test_rules_end_to_end import LOSSLESS, VOCAB, MarkovBackend, engine_of

from specserve.types import Request, RequestId, Sampling

TEMPERATURE = 0.9


def transitions_p_value(walks: list[tuple[int, ...]]) -> float:
    """Of all transitions of these walks under the Markov target at the temperature."""
    counts = np.zeros((VOCAB, VOCAB))
    for walk in walks:
        np.add.at(counts, (np.array(walk[:-1]), np.array(walk[1:])), 1)
    law = torch.softmax(MarkovBackend(1).logits[0].double() / TEMPERATURE, -1).numpy()
    expected = law * counts.sum(1, keepdims=True)
    looked_at = expected > 5
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[looked_at].sum()
    return float(stats.chi2.sf(statistic, looked_at.sum() - VOCAB))


def request(name: str, first: int, length: int, rule: str, *, branch: int = 0, depth: int | None = None) -> Request:
    return Request(
        RequestId(name),
        (first % VOCAB, 3, (first * 5) % VOCAB),
        length,
        Sampling(temperature=TEMPERATURE),
        seed=first,
        ignore_eos=True,
        rule=rule,
        branch=branch,
        depth=depth,
    )


@pytest.mark.parametrize("rule", LOSSLESS)
def test_staggered_answers_all_end_and_have_the_targets_law(rule: str) -> None:
    """Ten answers of 128 to 384 tokens and three of 256 to one prompt: exact lengths, the target's law, empty pools."""
    with engine_of(MarkovBackend, depth=4) as engine:
        batch = [request(f"a{n}", 10 + n, 128 + n * 256 // 9, rule) for n in range(10)]
        batch += [request(f"n{b}", 99, 256, rule, branch=b) for b in range(3)]
        done = engine.complete(batch)
        levels = engine.levels()
    assert [len(one.tokens) for one in done] == [one.max_tokens for one in batch]
    assert {one.finish_reason for one in done} == {"length"}
    assert (levels.slots_held, levels.target_blocks_held, levels.running) == (0, 0, 0)
    assert len({one.tokens for one in done[10:]}) == 3
    walks = [(*asked.prompt[-1:], *one.tokens) for asked, one in zip(batch, done, strict=True)]
    assert transitions_p_value(walks) > 1e-3


def test_a_follow_up_to_plain_decoding_speculates_as_if_afresh() -> None:
    """20 tokens without drafts, then a request that goes on from them at depth 4: as if it were the first."""

    def follow_up(engine, said: tuple[int, ...]):
        asked = Request(RequestId("next"), (1, 3, 5, *said, 7), 40, seed=8, ignore_eos=True, rule="coupled", depth=4)
        return engine.complete([asked])[0]

    with engine_of(depth=4) as engine:
        said = engine.complete([request("plain", 1, 20, "coupled", depth=0)])[0]
        assert (len(said.tokens), said.stats.drafted_tokens) == (20, 0)
        later = follow_up(engine, said.tokens)
        assert engine.levels().slots_held == 0
    with engine_of(depth=4) as fresh:
        expected = follow_up(fresh, said.tokens)
    assert (later.tokens, later.stats.histogram) == (expected.tokens, expected.stats.histogram)
    assert later.stats.kept_tokens > 0
