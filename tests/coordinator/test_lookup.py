"""Lookup beside a draft model: taken where it is worth more, also while the model is away, and no text changes."""

from __future__ import annotations

import random

import pytest
from harness import Pipeline
from scraped import Scrape
from toy_workers import reference

from specserve.config import DraftConfig, parse
from specserve.coordinator.guess_chances import GuessChances
from specserve.coordinator.lookup_worth import LookupWorth
from specserve.drafting import guessers_of, ngram, suffix
from specserve.errors import ConfigError

PROMPT = [3, 1, 4, 1, 5]
ANSWER = reference(PROMPT, 31)


def pipeline_of(lookup="suffix", **options):
    return Pipeline(depth=4, end=1000, lookup=lookup, **options)


def ask(pipeline, name):
    pipeline.submit(name, PROMPT, max_tokens=31)
    pipeline.settle()
    assert pipeline.tokens(name) == ANSWER
    return pipeline.last(name).stats


def looked_up(pipeline, result):
    """Tokens that came from lookup, as metrics have it."""
    name = "specserve_spec_decode_source_draft_tokens_total"
    return Scrape(pipeline.metrics.render()).sum(name, source="suffix", result=result)


@pytest.mark.parametrize("outcomes", [0, 4, "auto"])
def test_what_was_said_before_is_looked_up_and_the_rest_drafted(outcomes):
    """A draft model that errs at every third token; the second time the answer is known from the first."""
    pipeline = pipeline_of(outcomes=outcomes, miss=3)
    first, second, third = (ask(pipeline, name) for name in ("first", "second", "third"))
    assert first.kept_tokens < second.kept_tokens
    assert looked_up(pipeline, "kept") >= 24
    assert third.histogram[4] >= 5
    assert pipeline.idle()


@pytest.mark.parametrize("lookup", ["none", "suffix"])
def test_lookup_goes_on_without_the_draft_worker(lookup):
    """The worker is killed: without lookup every round is a plain one, with it nearly all of them are full."""
    pipeline = pipeline_of(lookup, miss=2)
    ask(pipeline, "first")
    pipeline.lose("draft")
    stats = ask(pipeline, "second")
    assert stats.kept_tokens >= 20 if lookup == "suffix" else stats.kept_tokens == 0


def test_a_perfect_model_keeps_its_rounds():
    """No match is taken of a length that was never worth more; a request that named its source is left to it."""
    pipeline = pipeline_of(miss=10**9)
    assert ask(pipeline, "first").kept_tokens == 24
    pipeline.submit("named", PROMPT, max_tokens=31, source="small_model")
    pipeline.settle()
    assert pipeline.tokens("named") == ANSWER
    assert looked_up(pipeline, "offered") == 0


def test_lengths_are_taken_by_what_was_kept_behind_them():
    """Matches of 2 bring 3 tokens, those of 6 none, the model 1.5: in the end 2 is taken always and 6 hardly ever."""
    worth, draws = LookupWorth("suffix"), random.Random(1)
    taken = {2: 0, 6: 0}
    for round_number in range(4000):
        for length, kept in ((2, 3), (6, 0)):
            if worth.better(length):
                worth.looked_up(length, kept)
                taken[length] += round_number >= 2000
            else:
                worth.drafted(draws.choice([1, 2]))
    assert 2000 - 2000 / 32 - 1 <= taken[2] < 2000
    assert 0 < taken[6] <= 2000 / 32 + 1


def test_a_model_that_was_late_for_long_is_tried_again():
    """Nothing of it was kept for 400 rounds, and a match is always found: what it is worth again is seen anyway."""
    worth, kept = LookupWorth("suffix"), 0
    for _ in range(400):
        worth.drafted(0)
    for round_number in range(6000):
        if worth.better(1):
            worth.looked_up(1, 0)
        else:
            worth.drafted(3)
            kept += round_number >= 3000
    assert kept > 2700


def test_an_absent_model_is_not_held_to_be_bad():
    """No round without a worker says anything of its drafts."""
    pipeline = pipeline_of("ngram", miss=10**9)
    ask(pipeline, "first")
    before = pipeline.engine._own_drafts._lookup._model
    pipeline.lose("draft")
    for number in range(10):
        pipeline.submit(f"away {number}", [number, 50 + number], max_tokens=10)
        pipeline.settle()
    assert pipeline.engine._own_drafts._lookup._model == before


@pytest.mark.parametrize("steps", range(8, 60, 4))
def test_what_was_looked_up_before_the_worker_came_is_not_its_draft(steps):
    """A worker joins amid an answer whose prompt was looked up: in its first round it has said nothing yet."""
    pipeline = pipeline_of("suffix", outcomes="auto", context=256, blocks=200, draft_blocks=200)
    engine = pipeline.engine
    pipeline.lose("draft")
    pipeline.submit("a", [*PROMPT, *ANSWER[:9], steps, 7, *ANSWER[2:8]], max_tokens=100)
    for _ in range(steps):
        pipeline.step()
    while engine._round is not None:
        pipeline.verifier.deliver(engine)
    state = engine._states["a"]
    pipeline.restart("draft")
    engine.advance()
    assert state.guessed_by == "suffix" or not engine._round.rows[0].chain.tokens
    pipeline.settle()
    assert pipeline.idle()


@pytest.mark.parametrize("matched", [-20, -1, None, float("nan")])
def test_a_guesser_that_returns_no_length_is_done_without(matched):
    class Wrong(suffix.SuffixGuesser):
        def look_up(self, row, depth):
            return matched, [1]

    guessers = guessers_of(DraftConfig()) | {"suffix": Wrong(1, 1000)}
    pipeline = Pipeline(depth=4, end=1000, lookup="suffix", guessers=guessers)
    assert ask(pipeline, "first").kept_tokens > 0
    assert looked_up(pipeline, "offered") == 0


@pytest.mark.parametrize("module", [ngram, suffix])
def test_guessers_say_how_long_their_match_was(module):
    """5 6 7 came before, 8 followed; of a history without repeats nothing is known."""
    guesser = module.build(DraftConfig(ngram_max=3))
    guesser.open(0, [5, 6, 7, 8, 9, 5, 6, 7])
    matched, tokens = guesser.look_up(0, 2)
    assert (matched, tokens) == (3, [8, 9])
    assert tokens == guesser.guess(0, 2)
    guesser.open(1, [1, 2, 3])
    assert guesser.look_up(1, 2) == (0, [])


@pytest.mark.parametrize("speculator", ["none", "ngram", "suffix"])
def test_lookup_beside_no_model_is_refused(speculator):
    with pytest.raises(ConfigError, match="set speculator to suffix and leave lookup out"):
        parse({"draft": {"speculator": speculator, "lookup": "suffix"}})


def test_guesses_are_as_sure_as_their_like_were_kept():
    """By source and length of the match, those of 8 and more alike; half of them before any was seen."""
    chances = GuessChances()
    assert chances.of("suffix", 3) == 0.5
    for _ in range(400):
        chances.observe("suffix", 3, 4, 3)  # three of the four that were tried
        chances.observe("suffix", 11, 4, 4)
        chances.observe("ngram", 3, 4, 0)
    assert chances.of("suffix", 3) == pytest.approx(0.75, abs=0.02)
    assert chances.of("suffix", 8) == chances.of("suffix", 99) > 0.98
    assert chances.of("ngram", 3) < 0.05
    assert chances.of("suffix", 2) == 0.5
    for _ in range(400):
        chances.observe("suffix", 3, 4, 0)
    assert chances.of("suffix", 3) < 0.05  # what was long ago fades
