"""The whole engine on emulated devices: same text with and without drafts, and a draft as good as its dials."""

from __future__ import annotations

import json

import numpy as np
import pytest
from paced_profiles import paced

from specserve import config as configs
from specserve.errors import InvalidField, SpecserveError
from specserve.local import LocalEngine
from specserve.models import _device_profile
from specserve.types import Request, RequestId, Sampling

DEPTH = 4


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """A profile of the measured pair, 200 times as fast."""
    return paced(tmp_path_factory.mktemp("profile"), "qwen3-32b-0.6b-h100", target=1 / 200, draft=1 / 200)


def engine(profile, **overrides):
    # Devices this fast are outpaced by the test itself, so that drafts ahead would come late: they take turns.
    settings = _device_profile.settings(str(profile)) | {"engine.max_requests": 32, "engine.depth": DEPTH}
    settings |= {"engine.outcomes": 0}
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


@pytest.mark.parametrize(("rule", "temperature"), [("rejection", 0.0), ("coupled", 1.0)])
def test_a_tree_says_the_same_in_fewer_rounds_where_runners_up_are_right(fast, rule, temperature):
    """A draft whose first choice is right in 4 of 10 places: 6 nodes as a tree against 6 in a row, odd blocks."""
    settings = {"engine.rule": rule, "draft.model.emulated.acceptance": 0.4, "engine.block_tokens": 3}
    shapes = {
        "plain": {"engine.depth": 0},
        "chain": {"engine.depth": 6},
        "static": {"engine.depth": 3, "engine.tree": [2]},
        "dynamic": {"engine.depth": 4, "engine.tree": "dynamic", "engine.tree_nodes": 6},
    }
    texts, rounds = {}, {}
    for name, shape in shapes.items():
        with engine(fast, **settings | shape) as running:
            done = answers(running, name, temperature, None, tokens=48)
            assert running.levels().slots_held == 0
        texts[name] = [one.tokens for one in done]
        rounds[name] = sum(one.stats.rounds for one in done)
    assert texts["plain"] == texts["chain"] == texts["static"] == texts["dynamic"]
    assert max(rounds["static"], rounds["dynamic"]) < 0.95 * rounds["chain"]


def test_crowded_pools_families_and_odd_blocks_pass_every_check_of_the_pages(fast):
    """Few blocks of 3 positions, six families of three, prompts in chunks: the text of a run with room for all."""
    requests = [
        Request(
            RequestId(f"{family}-{branch}"),
            tuple(range(258 + family, 258 + family + 10 + family)),
            20 + 3 * branch,
            Sampling(temperature=1.0),
            seed=family,
            branch=branch,
            family=str(family),
        )
        for family in range(6)
        for branch in range(3)
    ]
    tight = {
        "engine.block_tokens": 3,
        "engine.prefill_chunk": 4,
        **{f"{model}.kv_blocks": 64 for model in ("target", "draft.model")},
        **{f"{model}.context_length": 64 for model in ("target", "draft.model")},
    }
    texts = []
    for settings in ({"engine.depth": 0}, tight):
        with engine(fast, **{"engine.rule": "coupled"} | settings) as running:
            texts.append([one.tokens for one in running.complete(requests)])
            assert running.levels().target_blocks_held == 0
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == len(requests)


def test_a_machine_that_is_too_slow_for_its_profile_is_told_to_the_client(tmp_path, fast):
    """With strict, steps of a nanosecond are refused, and the answer's error names both times."""
    tree = json.loads(fast.read_text())
    for point in (*tree["target"]["decode"], *tree["target"]["extend"]):
        point["ms"] = 1e-6
    path = tmp_path / "impossible.json"
    path.write_text(json.dumps(tree))
    with (
        engine(path, **{"target.emulated.strict": True, "engine.depth": 0}) as running,
        pytest.raises(SpecserveError, match="the emulated device takes 0"),
    ):
        running.generate(["Hello"], max_tokens=2)


def test_text_goes_in_and_words_come_out(fast):
    """Any prompt is spelt in bytes and syllables and back; answers are words of lower-case syllables."""
    with engine(fast) as running:
        prompt = "Grüße, 世界! bada"
        tokenizer = running.tokenizer
        assert tokenizer.decode(tokenizer.encode(prompt, special=False)) == prompt
        answer = running.chat([{"role": "user", "content": prompt}], max_tokens=30)
        with pytest.raises(InvalidField, match=r"no option 'temperature'.*sampling=Sampling\(temperature"):
            running.chat([{"role": "user", "content": prompt}], temperature=0.7)
    assert len(answer.tokens) == 30
    assert answer.text.replace(" ", "").isalpha()
    assert answer.text.isascii()
