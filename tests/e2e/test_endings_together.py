"""Where an answer ends inside an accepted run, everything ends at the same token: text, usage, scores, counters, KV."""

from __future__ import annotations

import pytest
from scraped import Scrape
from test_rules_end_to_end import engine_of

from specserve.coordinator.commits import Commit
from specserve.types import Request, RequestId, Sampling

PROMPT = (3, 1, 4, 1)
DEPTH = 6


def ask(**options) -> Request:
    sampling = Sampling(temperature=0)
    return Request(
        RequestId("a"), PROMPT, **({"max_tokens": 24, "ignore_eos": True, "logprobs": 2} | options), sampling=sampling
    )


@pytest.fixture(scope="module")
def whole():
    """The target's greedy answer without drafts."""
    with engine_of(depth=DEPTH, draft_seed=1) as engine:
        (answer,) = engine.complete([ask(depth=0)])
    return answer


def finished(request: Request):
    """The answer, and what the engine counted; drafts are the target's own, so that runs are kept whole."""
    with engine_of(depth=DEPTH, draft_seed=1) as engine:
        (answer,) = engine.complete([request])
        text, levels = Scrape(engine.metrics_text()), engine.levels()
        engine._loop.call(engine._engine.check).result()
    return answer, text, levels


def assert_cut(answer, counted: Scrape, levels, whole, length: int, reason: str) -> None:
    """All of it ends at `length` tokens."""
    stats = answer.stats
    assert (answer.tokens, answer.finish_reason) == (whole.tokens[:length], reason)
    assert answer.logprobs == whole.logprobs[:length]
    assert stats.generated_tokens == length
    assert counted.sum("specserve_generation_tokens_total") == length
    assert sum(counted.by("kind", "specserve_spec_decode_emitted_tokens_total").values()) == length
    assert counted.sum("specserve_request_generation_tokens_sum") == length
    assert stats.kept_tokens == counted.sum("specserve_spec_decode_num_accepted_tokens_total")
    assert sum(kept * count for kept, count in enumerate(stats.histogram)) == stats.kept_tokens
    assert (levels.slots_held, levels.target_blocks_held, levels.draft_blocks_held) == (0, 0, 0)


@pytest.mark.parametrize("length", range(1, 12))
def test_max_tokens(whole, length):
    """Every length, so at every place of a run of 7."""
    answer, *counted = finished(ask(max_tokens=length))
    assert_cut(answer, *counted, whole, length, "length")
    assert answer.stats.kept_tokens == length - answer.stats.rounds  # all drafts are kept


def test_a_tail_that_stays_is_noticed(whole, monkeypatch):
    """A commit that is cut in its tokens, and not in what was kept, fails the comparison."""

    def half(self, cut):
        self.finish, self.tokens = cut.finish, self.tokens[: cut.length]

    monkeypatch.setattr(Commit, "end", half)
    with pytest.raises(AssertionError):
        test_a_stop_id(whole)


def test_a_stop_id(whole):
    """Each id of the answer as the one to stop at: it is not part of the answer."""
    for token in sorted(set(whole.tokens)):
        length = whole.tokens.index(token)
        if length:
            assert_cut(*finished(ask(stop_token_ids=(token,))), whole, length, "stop")


def test_a_stop_at_the_limit_is_a_stop(whole):
    """And one behind it is none."""
    token = whole.tokens[-1]
    length = whole.tokens.index(token)
    assert_cut(*finished(ask(stop_token_ids=(token,), max_tokens=length + 1)), whole, length, "stop")
    assert_cut(*finished(ask(stop_token_ids=(token,), max_tokens=length)), whole, length, "length")


def test_the_context(whole):
    """The table's context is 64: an answer ends where it is full, whatever it might still have said."""
    with engine_of(depth=DEPTH, draft_seed=1) as engine:
        context = engine.card.context_length
        (answer,) = engine.complete([ask(max_tokens=context - len(PROMPT))])
    assert len(answer.tokens) == len(answer.logprobs) == answer.stats.generated_tokens == context - len(PROMPT)
    assert answer.tokens[: len(whole.tokens)] == whole.tokens


@pytest.mark.parametrize(("generated", "depth"), [(5, 3), (2, 3), (1, 2), (7, 2), (6, 2)])
def test_known_caps(whole, generated, depth):
    """Prompts of 4: what other engines once cut or counted twice at these lengths and depths."""
    assert_cut(*finished(ask(max_tokens=generated, depth=depth)), whole, generated, "length")
