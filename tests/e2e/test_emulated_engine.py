"""The whole engine on emulated devices: same text with and without drafts, and a draft as good as its dials."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specserve import config as configs
from specserve.local import LocalEngine
from specserve.models import _device_profile
from specserve.types import Request, RequestId, Sampling

DEPTH = 4


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """A profile of the measured pair, 200 times as fast."""
    tree = json.loads((_device_profile.FOLDER / "qwen3-32b-0.6b-h100.json").read_text())
    for role in ("target", "draft"):
        for point in (*tree[role]["decode"], *tree[role]["extend"]):
            point["ms"] /= 200
    path = tmp_path_factory.mktemp("profile") / "fast.json"
    path.write_text(json.dumps(tree))
    return path


def engine(profile, **overrides):
    settings = _device_profile.settings(str(profile)) | {"engine.max_requests": 32, "engine.depth": DEPTH}
    return LocalEngine(configs.parse(configs.override({}, settings | overrides)))


def answers(running, name, temperature, depth, count=16, tokens=96):
    prompts = running.tokenizer.encode("Say something in sixteen ways", special=False)
    requests = [
        Request(
            RequestId(f"{name}-{number}"),
            (*prompts, 258 + number),
            tokens,
            Sampling(temperature=temperature),
            seed=number,
            depth=depth,
        )
        for number in range(count)
    ]
    return running.complete(requests)


def first_position(done):
    """Share of decode rounds that kept at least one drafted token, and how many rounds there were.

    The last rounds of an answer, which have no room for a draft, count as refusals: one in 30 of them here.
    """
    histogram = np.sum([np.pad(one.stats.histogram, (0, DEPTH + 1))[: DEPTH + 1] for one in done], 0)
    return 1 - histogram[0] / histogram.sum(), histogram.sum()


@pytest.mark.parametrize(("rule", "temperature"), [("rejection", 0.0), ("coupled", 0.0), ("coupled", 1.0)])
def test_drafts_change_nothing_but_the_number_of_rounds(fast, rule, temperature):
    """16 answers of 96 tokens at once, greedy and with shared noise; every history is checked by the pages."""
    with engine(fast, **{"engine.rule": rule}) as running:
        plain = answers(running, "plain", temperature, 0)
        drafted = answers(running, "drafted", temperature, DEPTH)
        assert running.levels().slots_held == 0

    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert len({one.tokens for one in plain}) == len(plain)
    rounds = [sum(one.stats.rounds for one in done) for done in (plain, drafted)]
    assert rounds[1] < rounds[0] / 2


@pytest.mark.parametrize(
    ("rule", "temperature", "acceptance"),
    [("rejection", 0.0, 0.78), ("coupled", 1.0, 0.78), ("rejection", 1.0, 0.78), ("rejection", 0.0, 0.4)],
)
def test_the_share_of_first_drafts_kept_is_the_dial(fast, rule, temperature, acceptance):
    """About 500 rounds each, within four standard deviations of what the language documents, plus the answers' ends."""
    settings = {"engine.rule": rule, "draft.model.emulated.acceptance": acceptance}
    with engine(fast, **settings) as running:
        measured, rounds = first_position(answers(running, "r", temperature, DEPTH))

    expected = acceptance + (0.9 * (1 - acceptance) / 32 if temperature else 0)
    slack = 4 * np.sqrt(expected * (1 - expected) / rounds)
    assert expected - slack - 0.035 < measured < expected + slack
    assert slack < 0.1


def test_a_draft_of_another_language_is_refused_from_the_start():
    """Different seeds would silently mean no acceptance at all."""
    with pytest.raises(configs.ConfigError, match="unrelated languages"):
        configs.parse(
            {"target": {"source": "emulated"}, "draft": {"model": {"source": "emulated", "emulated": {"seed": 1}}}}
        )


def test_text_goes_in_and_words_come_out(fast):
    """Any prompt is spelt in bytes and syllables and back; answers are words of lower-case syllables."""
    with engine(fast) as running:
        prompt = "Grüße, 世界! bada"
        tokenizer = running.tokenizer
        assert tokenizer.decode(tokenizer.encode(prompt, special=False)) == prompt
        answer = running.chat([{"role": "user", "content": prompt}], max_tokens=30)
    assert len(answer.tokens) == 30
    assert answer.text.replace(" ", "").isalpha()
    assert answer.text.isascii()
