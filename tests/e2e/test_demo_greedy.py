"""The real demo pair over HTTP: greedy text is transformers' own, at any depth, with any speculator, in any company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import greedy_reference
import pytest
from http_server import serving

from specserve.bench.prompts import CHATS
from specserve.local import LocalEngine

TOKENS = 20
PREFILL_CHUNK = 48
SPECULATORS = ("small_model", "ngram")

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def servers():
    """One engine for each speculator, both deep enough for every depth; requests choose their own."""
    started = {}
    try:
        for speculator in SPECULATORS:
            engine = LocalEngine(
                {
                    "draft": {"speculator": speculator},
                    "target": {"kv_memory_gib": 0.5, "context_length": 2048},
                    "engine": {"depth": 8, "prefill_chunk": PREFILL_CHUNK, "max_batch_tokens": 128, "max_requests": 8},
                }
            )
            server = serving(engine)
            started[speculator] = (engine, server.__enter__(), server)
        yield {name: (engine, url) for name, (engine, url, _) in started.items()}
    finally:
        for engine, _, server in started.values():
            server.__exit__(None, None, None)
            engine.close()


@pytest.fixture(scope="module")
def expected():
    """Text and tokens of transformers' own greedy generate for each shipped prompt."""
    answers = greedy_reference.generate(TOKENS)
    assert max(length for length, _, _ in answers) > 3 * PREFILL_CHUNK
    return answers


def ask(url, text, depth):
    return greedy_reference.ask(url, text, depth, TOKENS)


CASES = [
    pytest.param(depth, speculator, together, marks=() if sampled else pytest.mark.full)
    for depth in (0, 1, 4, 8)
    for speculator in SPECULATORS
    for together in (1, 8)
    for sampled in [(depth, speculator, together) in {(4, "small_model", 8), (8, "ngram", 8)}]
]


@pytest.mark.parametrize(("depth", "speculator", "together"), CASES)
def test_greedy_text_over_http_is_transformers_own(servers, expected, depth, speculator, together):
    """All shipped prompts, some of them longer than the prefill chunk, one by one or eight at a time."""
    _, url = servers[speculator]
    with ThreadPoolExecutor(together) as pool:
        got = list(pool.map(lambda text: ask(url, text, depth), CHATS))

    assert got == expected


def test_one_prompt_alone_at_every_depth_and_speculator(servers, expected):
    """The sampled matrix still sees every depth and both speculators with a request on its own."""
    for speculator in SPECULATORS:
        for depth in (0, 1, 4, 8):
            assert ask(servers[speculator][1], CHATS[6], depth) == expected[6]


def test_drafts_are_really_kept(servers):
    """Speculation does something: asked to repeat a text, the ngram speculator's drafts are kept."""
    engine, _ = servers["ngram"]
    answer = engine.chat([{"role": "user", "content": CHATS[6]}], max_tokens=60)

    assert answer.stats.kept_tokens > 10
    assert answer.stats.rounds < answer.stats.generated_tokens
    assert engine.levels().slots_held == engine.levels().target_blocks_held == 0


@pytest.mark.parametrize("outcomes", [pytest.param(1, marks=pytest.mark.full), 10])
def test_drafting_ahead_gives_the_same_text(expected, outcomes):
    """Both workers of the demo pair at once, on threads of their own: four prompts, greedy, branches that come true."""
    some = [6, 0, 3, 5]
    settings = {"target": {"kv_memory_gib": 0.5, "context_length": 2048}, "engine": {"depth": 3, "outcomes": outcomes}}
    with LocalEngine(settings) as engine:
        prompts = [engine.tokenizer.chat_prompt([{"role": "user", "content": CHATS[at]}]) for at in some]
        answers = engine.generate(prompts, max_tokens=TOKENS)
        hits = engine._loop.call(lambda: engine._engine._drafts.hits).result()

    assert [answer.text for answer in answers] == [expected[at][1] for at in some]
    assert hits > 0


@pytest.mark.full  # default tests have trees of tiny models, and this pair without trees
@pytest.mark.parametrize("tree", ["dynamic", [4, 2]])
def test_drafted_trees_give_the_same_text(expected, tree):
    """The demo pair with trees of a dozen tokens: four prompts at once, greedy; second guesses are really kept."""
    some = [6, 0, 3, 5]
    settings = {"target": {"kv_memory_gib": 0.5, "context_length": 2048}, "engine": {"depth": 3, "tree": tree}}
    with LocalEngine(settings) as engine:
        prompts = [engine.tokenizer.chat_prompt([{"role": "user", "content": CHATS[at]}]) for at in some]
        answers = engine.generate(prompts, max_tokens=TOKENS)
        levels = engine.levels()

    assert [answer.text for answer in answers] == [expected[at][1] for at in some]
    assert sum(answer.stats.kept_tokens for answer in answers) > 10
    assert levels.slots_held == levels.target_blocks_held == levels.draft_blocks_held == 0
